"""A whole set of pictures on the device, and its batches made there: the very ones the plain loader makes."""
