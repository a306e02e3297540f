"""Loading pictures with NVIDIA DALI."""
