"""The climb: which rung next, what it is predicted to save, and whether it is kept."""
