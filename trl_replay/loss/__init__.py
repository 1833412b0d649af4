"""Inside the trainer's loss: log-probs recorded and supplied, gates, masks and what was seen of replayed rows."""
