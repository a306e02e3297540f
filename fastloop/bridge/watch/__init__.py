"""Watches a fit: phases of the step, the timed window, probes, and the measurement that comes of it."""
