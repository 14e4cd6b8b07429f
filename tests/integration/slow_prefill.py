"""A prefill rank whose forward pass runs beside the host, and a decode rank: who is too early reads what was there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fakes.async_device import STALE, AsyncRuntime, async_device
from fakes.streams import AsyncStream
from integration.ranks import Cache, Pair, make_pair
from patience import EDGE_S
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PrefillStep, PushSlice
from pdcluster_protocol.labels import Role

SETTINGS: Final = Settings(quarantine_s=0.5, hold_s=EDGE_S, lease_s=EDGE_S, handshake_timeout_s=EDGE_S)
"""No deadline ends what a test holds back."""


@dataclass(frozen=True)
class SlowPrefill:
    """Both ranks, and the device of the one."""

    pair: Pair
    runtime: AsyncRuntime
    final: Cache
    """What the model computes."""

    @property
    def forward(self) -> AsyncStream:
        """The stream of the forward pass."""
        return self.runtime.default

    @property
    def names(self) -> list[str]:
        return self.final.shape.layer_names()

    def compute(self, part: PushSlice, blocks: Sequence[int], *, hooked: Sequence[str] | None = None) -> None:
        """One forward pass: of each layer one kernel that writes ``blocks``, and vLLM's hook, if it has one."""
        worker = self.pair.prefill.worker
        worker.begin_step(PrefillStep(self.pair.life, (part,)))
        for layer, name in enumerate(self.names):
            self.kernel(layer, blocks)
            if hooked is None or name in hooked:
                worker.layer_saved(name)
        worker.end_step()

    def kernel(self, layer: int, blocks: Sequence[int], content: int | None = None) -> None:
        """``blocks`` of one layer get what the model computes, or ``content``. One operation."""
        rows = torch.tensor(list(blocks))
        value = torch.from_numpy(self.final.layers[layer, blocks]) if content is None else torch.tensor(content)
        memory = self.runtime.tensor(torch.from_numpy(self.pair.source.layers[layer]))
        memory.index_put_((rows,), value.to(torch.uint8))

    def arrived(self, layer: int, block: int) -> bool:
        """Whether decode has what the model computed for prefill's block 1 of this layer in ``block``."""
        return np.array_equal(self.pair.target.layers[layer, block], self.final.layers[layer, 1])

    def lane_waits(self, number: int, layer: int, block: int) -> bool:
        """Whether the lane waits for this event, and decode has nothing of ``layer`` and the next ones in ``block``."""
        untouched = self.pair.target.layers[layer:, block]
        return self.forward.is_awaited(number, lambda: bool(untouched.any()))


@contextmanager
def slow_prefill(settings: Settings = SETTINGS) -> Iterator[SlowPrefill]:
    """Prefill's device does nothing before the test lets it."""
    with async_device() as (device, runtime), make_pair(settings=settings, devices={Role.PREFILL: device}) as pair:
        pair.source.layers[:] = STALE
        final = Cache(pair.source.shape)
        final.fill(2)
        runtime.default.hold()
        yield SlowPrefill(pair, runtime, final)
        runtime.default.release()
