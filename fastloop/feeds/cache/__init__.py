"""Caches samples after the part of their work that is the same each time: what is stored, where, for which dataset."""
