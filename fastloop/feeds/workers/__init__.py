"""Worker processes for a loader that had none: tried first, with a limit, and with room left for the training."""
