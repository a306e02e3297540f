"""Runs modules by compiled graphs, which passes may change first."""
