"""A session on disk: with the trainer's own checkpoints, and back."""
