"""What the command line does, one command a file. They compute and return an Answer; only cli.py prints."""
