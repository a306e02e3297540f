"""What the code that makes samples does: random draws, state, threads, and changes between batches or epochs."""
