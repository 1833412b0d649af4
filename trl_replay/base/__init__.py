"""Helpers that know nothing of replay."""
