"""Whether an arm is faster, and whether it is the same training: statistics, parity gates and predictions on plain
numbers."""
