"""Changes live objects as planned, and changes them back. Nothing else may."""
