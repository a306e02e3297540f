"""The loss over a large vocabulary."""
