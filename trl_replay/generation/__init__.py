"""Prompts and dynamic sampling: what is generated before and between the trainer's scorings."""
