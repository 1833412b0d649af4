"""The folder that `trl-replay run` puts on PYTHONPATH."""
