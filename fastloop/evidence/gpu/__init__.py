"""The GPU as NVML and its datasheet know it: readings, counters, peaks, and what a sample costs."""
