"""The only place that knows Lightning: the callback, the strategies, and the one file that changes live objects."""
