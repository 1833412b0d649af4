"""Storages: where payloads are kept."""

from __future__ import annotations

from ..types import Group


class DeviceStorage:
    """Keeps payloads on the device that made them: no copies between devices, but device memory."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._nbytes = 0

    def put(self, serial: int, group: Group) -> None:
        """Keeps a copy of `group`."""
        self._keep(serial, _copy(group))

    def get(self, serial: int) -> Group:
        """A fresh copy of the group."""
        return _copy(self._groups[serial])

    def remove(self, serial: int) -> None:
        """Forgets the group."""
        group = self._groups.pop(serial)
        self._nbytes -= group.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of payload held."""
        return self._nbytes

    def _keep(self, serial: int, group: Group) -> None:
        self._groups[serial] = group
        self._nbytes += group.nbytes


class CpuStorage(DeviceStorage):
    """Keeps payloads in main memory."""

    on_cpu = True

    def put(self, serial: int, group: Group) -> None:
        """Keeps a copy of `group` on the CPU."""
        self._keep(serial, group.map(lambda tensor: tensor.to("cpu", copy=True)))


def _copy(group: Group) -> Group:
    """The group in memory of its own, on the device where it is."""
    return group.map(lambda tensor: tensor.clone())
