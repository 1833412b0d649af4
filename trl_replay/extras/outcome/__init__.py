"""What a run came to, and what to change."""
