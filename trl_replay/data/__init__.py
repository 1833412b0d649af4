"""The values that everything passes: groups, the table of the buffer, and the plan of a batch."""
