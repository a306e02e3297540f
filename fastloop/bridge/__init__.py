"""The only package that knows Lightning: the callback, the strategies, and the code that changes live objects."""
