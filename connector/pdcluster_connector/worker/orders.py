"""What the forward thread tells a lane. Small frozen records: making and queueing one is all it pays."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeAlias

from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.steps import PushSlice
from pdcluster_connector.worker.device import DeviceEvent


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A forward pass starts that completes blocks of ``slices``. ``at``: monotonic seconds."""

    step: int
    at: float
    slices: tuple[PushSlice, ...]


@dataclass(frozen=True, slots=True)
class LayerSaved:
    """The regions ``regions`` (indices) are final for this step once ``event`` is complete."""

    step: int
    regions: range
    event: DeviceEvent
    at: float


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The forward pass is over and every region of the step was ordered."""

    step: int
    at: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """vLLM ended the request before its last block was computed."""

    key: PushKey
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """vLLM has freed the request's blocks: no order will name ``key`` again."""

    key: PushKey


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Set ``quiet`` as soon as no byte of ``key`` is queued or in flight."""

    key: PushKey
    quiet: threading.Event


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread as soon as every push has ended, at ``deadline`` (monotonic seconds) at the latest."""

    deadline: float


Order: TypeAlias = StepBegun | LayerSaved | StepEnded | GiveUp | Forget | Quiesce | Close
