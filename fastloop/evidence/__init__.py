"""What a process can prove about itself: graphs captured, clocks, queues, datasets, dtypes."""
