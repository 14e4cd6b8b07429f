"""A device whose events the test completes by hand, one by one: for what asks about them, not for work itself.

``async_device.py`` has one that works.
"""

from __future__ import annotations

from pdcluster_connector.device import CpuDevice, DeviceEvent


class ManualEvent:
    """Complete once ``complete`` was called."""

    def __init__(self) -> None:
        self._is_complete = False

    def complete(self) -> None:
        self._is_complete = True

    def query(self) -> bool:
        """As ``torch.Event.query``."""
        return self._is_complete


class ManualDevice(CpuDevice):
    """Records events that the test completes, in any order."""

    def __init__(self) -> None:
        self.events: list[ManualEvent] = []
        """Of every ``record``, in order."""

    def record(self) -> DeviceEvent:
        self.events.append(ManualEvent())
        return self.events[-1]
