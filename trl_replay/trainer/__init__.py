"""What is put on one trainer, and taken off again: the seam, a callback, a column in its table of completions."""
