"""A few traced steps: recording them, and an account of their kernels and their idle time."""
