"""Documents with charts and curves, and their conversion to Markdown and HTML."""
