"""A loader's batches, made by threads of this process."""
