"""The calls that make the host wait for the device, and the user's lines that take the host's time."""
