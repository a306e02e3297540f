"""Finds hand-written attention, matches its parts, and replaces it by a single call."""
