"""Replacements for parts of Lightning's training loop, if its source is a known version."""
