"""Floating-point operations of a step: of eager code, of compiled modules, and of captured graphs."""
