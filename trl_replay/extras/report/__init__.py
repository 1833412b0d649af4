"""Looking at checkpoints and runs."""
