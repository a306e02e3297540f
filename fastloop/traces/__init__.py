"""From a recorded trace to an account of its steps. Pure: no torch, no Lightning."""
