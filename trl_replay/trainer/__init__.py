"""Puts a session on one trainer, and takes it off again: the seam, a callback, a column in its completions table."""
