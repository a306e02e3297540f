"""What the data rungs put in place: cloned loaders, device feeds, merged windows, pieces of a batch."""
