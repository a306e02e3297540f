"""What the data rungs hand out: cloned loaders, device feeds, merged windows, pieces of a batch."""
