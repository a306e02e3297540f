"""Watches a fit: phases of the step, the timed window, probes, and the resulting measurement."""
