"""Documents, their charts and curves, and how they become Markdown and HTML."""
