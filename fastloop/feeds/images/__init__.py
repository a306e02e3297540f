"""Datasets of image files, and what their transforms do."""
