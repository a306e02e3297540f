"""Batches picked at once from tensors and arrays that are in memory, in place of sample by sample."""
