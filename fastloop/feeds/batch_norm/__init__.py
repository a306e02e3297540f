"""Batch normalization when several of the user's batches run as one."""
