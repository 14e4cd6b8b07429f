"""A prefill rank and two decode engines, of which one side is on a device that tells late of what it has not done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec
import numpy as np
import torch

from fakes.async_device import STALE, AsyncRuntime, async_device
from integration.ranks import (
    Cache,
    Pair,
    Shape,
    content_of,
    engine_facts,
    expect,
    fingerprint_of,
    make_pair,
    stepped_until,
)
from integration.test_content_order import on_device
from pdcluster_connector.assembly import make_decode_rank
from pdcluster_connector.device import Device
from pdcluster_connector.ending import end_parts
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import DecodeStep, PrefillStep, PushSlice
from pdcluster_protocol.labels import Role

SETTINGS: Final = Settings(quarantine_s=0.2, hold_s=0.2, lease_s=20.0, handshake_timeout_s=20.0)
SHAPE: Final = Shape(num_layers=3)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Blocks ``ours`` of prefill belong into blocks ``theirs`` of the decode engine ``number``."""

    name: str
    number: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    is_compared: bool


@dataclass(frozen=True, slots=True)
class Rig:
    """``pairs``: the same prefill rank with either decode engine."""

    pairs: tuple[Pair, Pair]
    runtime: AsyncRuntime
    """Of the side that is on a device."""
    device: Device
    """Likewise, as the connector has it."""
    final: Cache
    """What the model computes."""
    is_beside: bool
    """Whether the forward pass runs beside the host."""

    def expect(self, prompt: Prompt) -> None:
        """Decode's scheduler has reserved the blocks."""
        content = content_of(prompt.theirs) if prompt.is_compared else None
        news = expect(prompt.name, len(prompt.theirs), 120_000, content)
        self.pairs[prompt.number].decode.worker.begin_step(DecodeStep(expects=(news,)))

    def forward(self, *parts: tuple[Prompt, slice], then: Callable[[], object] = bool) -> None:
        """One step computes these blocks of these prompts; the last of each prompt are its last ones.

        ``then``: what happens after each kernel, before vLLM's hook.
        """
        worker = self.pairs[0].prefill.worker
        worker.begin_step(PrefillStep(self.pairs[0].life, tuple(self._slice(*part) for part in parts)))
        blocks = [block for prompt, which in parts for block in prompt.ours[which]]
        for layer, name in enumerate(SHAPE.layer_names()):
            self._kernel(layer, blocks)
            then()
            worker.layer_saved(name)
        worker.end_step()

    def step(self, finished: Sequence[str] = ()) -> None:
        self.pairs[0].step(finished)
        self.pairs[1].step()

    def require_true_end(self, prompt: Prompt) -> bool:
        """Its wait has ended; whether it was received. Then decode has what the model computed."""
        pair = self.pairs[prompt.number]
        assert stepped_until(self.step, lambda: prompt.name in pair.ended), f"{prompt.name} never ends"
        if pair.ended[prompt.name]:
            theirs, ours = pair.target.layers[:, prompt.theirs], self.final.layers[:, prompt.ours]
            assert np.array_equal(theirs, ours), f"{prompt.name}: an answer from what was never computed"
        return pair.ended[prompt.name]

    def require_released(self, *prompts: Prompt) -> None:
        """Every block of prefill comes back."""
        self.step([prompt.name for prompt in prompts])
        names = {prompt.name for prompt in prompts}
        assert stepped_until(self.step, lambda: names <= self.pairs[0].released), "blocks are kept for ever"

    def _slice(self, prompt: Prompt, which: slice) -> PushSlice:
        ours, theirs = prompt.ours[which], prompt.theirs[which]
        is_last = ours[-1] == prompt.ours[-1]
        part = self.pairs[prompt.number].slice_of(prompt.name, ours, theirs, is_last=is_last)
        if not (is_last and prompt.is_compared):
            return part
        return msgspec.structs.replace(part, content=content_of(prompt.ours, prompt.theirs))

    def _kernel(self, layer: int, blocks: Sequence[int]) -> None:
        rows, memory = torch.tensor(list(blocks)), torch.from_numpy(self.pairs[0].source.layers[layer])
        content = torch.from_numpy(self.final.layers[layer, blocks])
        (self.runtime.tensor(memory) if self.is_beside else memory).index_put_((rows,), content)


@contextmanager
def late_rig(side: Role, change: Callable[[Memory], Memory] = lambda memory: memory) -> Iterator[Rig]:
    """``side`` is on the device; of two decode engines the first is. ``change``: of what that rank sees."""
    with ExitStack() as stack:
        device, runtime = stack.enter_context(async_device())
        memories = {side: lambda memory: change(on_device(runtime)(memory))}
        pair = stack.enter_context(make_pair(SHAPE, SETTINGS, devices={side: device}, changes=memories))
        stack.callback(runtime.release)
        pair.source.layers[:] = STALE
        final, target = Cache(SHAPE), Cache(SHAPE)
        final.fill(2)
        ours = target.memory(fingerprint_of(SHAPE))
        decode = make_decode_rank(engine_facts(Role.DECODE, SHAPE, SETTINGS), ours)
        stack.callback(end_parts, [decode])
        second = replace(pair, decode=decode, target=target, ended={}, losses=[])
        yield Rig((pair, second), runtime, device, final, is_beside=side is Role.PREFILL)
