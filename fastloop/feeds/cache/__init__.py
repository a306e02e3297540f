"""Caches samples after the steps that are the same each time: what is stored, where, and for which dataset."""
