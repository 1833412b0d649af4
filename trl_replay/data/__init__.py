"""Data types shared by all modules: groups, the buffer's table, and the plan of a batch."""
