"""A device whose work is over when the test says so."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

from pdcluster_connector.device import DeviceEvent


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
        return as_device_event(self.events[-1])

    def is_done(self, event: DeviceEvent) -> bool:
        return event is None or bool(event.query())


class ManualStream:
    """A side stream; the test completes its marks."""

    def __init__(self) -> None:
        self.marks: list[ManualEvent] = []

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self) -> DeviceEvent:
        self.marks.append(ManualEvent())
        return as_device_event(self.marks[-1])


def as_device_event(event: ManualEvent) -> DeviceEvent:
    """PyTorch has no event that a test could complete: this one answers the one question that is asked."""
    return cast("torch.Event", event)
