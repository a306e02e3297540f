"""A fit with FastLoop: the callback, the strategies, recipes, the run directory, shutdown."""
