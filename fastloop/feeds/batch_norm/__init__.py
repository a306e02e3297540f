"""Batch normalization where several of the user's batches run as one."""
