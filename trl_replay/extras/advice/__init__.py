"""What a log says, and what to change."""
