"""SVG pictures and their labels."""
