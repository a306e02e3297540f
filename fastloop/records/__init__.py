"""The records that the stages exchange, and the store that writes and reads them. Free of torch and Lightning."""
