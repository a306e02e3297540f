"""Saves what the user's code may change, and restores it."""
