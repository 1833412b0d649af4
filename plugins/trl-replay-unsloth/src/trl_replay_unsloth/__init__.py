"""Unsloth's trainer: its layout of a batch, where its loss is tapped, and whether both are the known ones."""
