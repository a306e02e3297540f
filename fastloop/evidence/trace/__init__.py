"""A few traced steps: their recording, and an account of their kernels and idle time."""
