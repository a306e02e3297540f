"""Worker processes for a loader that had none: on trial, with a time limit, and with CPUs left for the training."""
