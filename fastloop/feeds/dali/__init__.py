"""NVIDIA DALI as the engine that loads pictures."""
