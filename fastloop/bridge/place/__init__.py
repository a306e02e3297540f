"""Keeps a run's position in its data in Lightning's checkpoints."""
