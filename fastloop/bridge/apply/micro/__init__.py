"""Batches that are cut or merged: the size that suits the device, proven to be the same training."""
