"""Communication between ranks: which rows lie where, what is agreed upon, what has to move."""
