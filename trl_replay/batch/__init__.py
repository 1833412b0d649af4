"""Tensors in and out of TRL's batch: the only code that pads."""
