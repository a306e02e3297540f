"""Makes a loader's batches in threads of this process."""
