"""A storage for buffers without payload."""

from __future__ import annotations


class Ledger:
    """A storage of serial numbers only."""

    nbytes = 0

    def __init__(self):
        self.serials = set()

    def put(self, serial, group):
        assert serial not in self.serials
        self.serials.add(serial)

    def remove(self, serial):
        self.serials.remove(serial)
