"""Records to text and files. Computes nothing; imports neither torch nor Lightning."""
