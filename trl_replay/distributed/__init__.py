"""Communication between ranks: the layout of rows, agreement on decisions, and moves of payload."""
