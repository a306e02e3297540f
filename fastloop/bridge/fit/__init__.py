"""A fit with FastLoop in it: the callback, the strategies, recipes, the run directory, the end."""
