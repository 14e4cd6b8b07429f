"""A device whose events the test completes by hand, one by one: for what asks about them, not for work itself.

``async_device.py`` has one that works.
"""

from __future__ import annotations

import torch

from pdcluster_connector.device import DeviceEvent, NoStream, Stream


class ManualEvent:
    """Complete once ``complete`` was called."""

    def __init__(self) -> None:
        self._is_complete = False

    def complete(self) -> None:
        self._is_complete = True

    def query(self) -> bool:
        """As ``torch.Event.query``."""
        return self._is_complete


class ManualDevice:
    """Records events that the test completes, in any order."""

    registration_alignment_bytes = 1

    def __init__(self) -> None:
        self.events: list[ManualEvent] = []
        """Of every ``record``, in order."""

    def record(self) -> DeviceEvent:
        self.events.append(ManualEvent())
        return self.events[-1]

    def enter_thread(self) -> None:
        """There is one device."""

    def is_done(self, event: DeviceEvent) -> bool:
        return event is None or event.query()

    def open_stream(self, device: torch.device) -> Stream:  # it has none
        return NoStream()
