"""Whether an arm is faster, and the same training: statistics, parity gates and predictions on plain numbers."""
