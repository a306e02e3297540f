"""Where a run stands in its data, in Lightning's checkpoints."""
