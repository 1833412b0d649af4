"""Replay for TRL's AsyncGRPOTrainer: a queue in the place of the one that its dataset reads, on the main process."""
