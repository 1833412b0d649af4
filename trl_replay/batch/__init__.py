"""Cuts tensors out of TRL's batch and puts them in: the only code that pads."""
