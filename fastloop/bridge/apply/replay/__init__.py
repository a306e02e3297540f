"""Records a training step in mid-run, and replays it at the point where Lightning runs it."""
