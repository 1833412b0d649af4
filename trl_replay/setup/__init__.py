"""From what a user writes down to what a session is made of, all before training."""
