"""Attention that is written out by hand: where it is, how it reads, and one call in its place."""
