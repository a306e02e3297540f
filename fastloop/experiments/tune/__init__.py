"""One number of one rung, searched by training."""
