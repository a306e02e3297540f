"""Tries rungs before they count: on the calls of the first step, and once more in the steps after it."""
