"""The buffer: entries, groups on their way in, and how much of it may be replayed."""
