"""Groups as bytes, for sending and for files."""
