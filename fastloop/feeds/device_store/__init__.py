"""Keeps a whole set of pictures on the device and makes its batches there, identical to the plain loader's."""
