"""Samples kept after the part of their work that is the same each time: what is kept, where, and for which dataset."""
