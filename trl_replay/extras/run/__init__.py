"""What the processes of `trl-replay run` start with, and the receipts that they leave."""
