"""The calls that make the host wait for the device, by the user's own line."""
