"""The report of one run: summary, tables, pictures, Markdown and HTML."""
