"""Where ranks talk to each other: which rows lie where, what is agreed upon, what has to move."""
