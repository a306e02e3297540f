"""Where a run stands in its data: the order of an epoch, drawn once more and entered in its middle."""
