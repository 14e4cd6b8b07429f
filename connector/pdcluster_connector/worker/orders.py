"""Orders of the forward thread and the resharder to a lane: small frozen records that are cheap to make and to queue.

The resharder's ``ReshardFailed`` and ``StepRead`` are orders too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pdcluster_connector.core.adapters import AdapterLoad
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.device import DeviceEvent
from pdcluster_connector.reshard import ReshardFailed, ReshardItem, StagedPart, StagingBuffer, StepRead
from pdcluster_connector.steps import PushSlice
from pdcluster_protocol.ids import RequestId


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A forward pass starts that completes blocks of ``slices``. ``at``: monotonic seconds."""

    step: int
    at: float
    slices: tuple[PushSlice, ...]
    adapters: Mapping[RequestId, AdapterLoad] = field(default_factory=dict)
    """Of requests with a LoRA adapter: the load with which this step computes."""


@dataclass(frozen=True, slots=True)
class LayerSaved:
    """The regions ``regions`` (indices) are final for this step once ``event`` is complete."""

    step: int
    regions: range
    event: DeviceEvent
    at: float


@dataclass(frozen=True, slots=True)
class StagedWrite:
    """One push's part of one region, in staging memory: the region's bytes begin at address ``base``.

    Each lane that takes the order releases ``buffer`` once, when the lane does not read the part any more.
    """

    key: PushKey
    item: ReshardItem
    part: StagedPart
    base: int
    buffer: StagingBuffer


@dataclass(frozen=True, slots=True)
class Staged:
    """Parts of the region ``region`` (index) lie in staging memory, as decode has them. From the resharder's thread."""

    step: int
    region: int
    writes: tuple[StagedWrite, ...]
    at: float


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The forward pass is over and every region of the step was ordered."""

    step: int
    at: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give the push up: vLLM has ended its request early, or overwrites its blocks after a preemption."""

    key: PushKey
    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """vLLM has freed the request's blocks: no order will name ``key`` again."""

    key: PushKey


@dataclass(frozen=True, slots=True)
class Quiesce:
    """Set ``quiet`` as soon as neither a write nor a sum of ``key`` reads the request's blocks any more."""

    key: PushKey
    quiet: threading.Event


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread as soon as every push has ended, at ``deadline`` (monotonic seconds) at the latest."""

    deadline: float


StepOrder: TypeAlias = StepBegun | LayerSaved | Staged | ReshardFailed | StepEnded | StepRead
Order: TypeAlias = StepOrder | GiveUp | Forget | Quiesce | Close


def discard(order: Order) -> None:
    """``order`` will not be carried out: releases its buffers, or wakes the thread that waits for it."""
    match order:
        case Staged(writes=writes):
            for write in writes:
                write.buffer.release()
        case Quiesce(quiet=quiet):
            quiet.set()
        case _:
            pass
