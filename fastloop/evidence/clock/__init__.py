"""The step on one clock: host marks and device events, sampled phases, pauses, drift."""
