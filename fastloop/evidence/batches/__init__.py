"""Code that runs on batches, and code that chooses them, while the model trains."""
