"""The GPU according to NVML and its datasheet: readings, counters, peaks, and the cost of a sample."""
