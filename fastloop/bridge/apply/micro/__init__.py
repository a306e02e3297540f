"""Cuts or merges batches to a size that suits the device, after proof that the training stays the same."""
