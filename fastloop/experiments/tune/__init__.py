"""The search for one number of one rung, by training."""
