"""Batches picked at once from tensors and arrays in memory, instead of sample by sample."""
