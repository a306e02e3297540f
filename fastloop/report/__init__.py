"""Turns records into text and files. Computes no results; imports neither torch nor Lightning."""
