"""The records that travel between the stages, and the store that writes and reads them. Free of torch and Lightning."""
