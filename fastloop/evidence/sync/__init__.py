"""The calls that make the host wait for the device, attributed to the user's line."""
