"""Is it faster, and is it the same training? Statistics, parity gates and predictions, on plain numbers."""
