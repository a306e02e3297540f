"""What stands in for Lightning's own training loop, where the text of that is known."""
