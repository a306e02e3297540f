"""Evidence that a process can collect about itself: captured graphs, clocks, queues, datasets, dtypes."""
