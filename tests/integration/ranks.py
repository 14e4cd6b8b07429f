"""A prefill rank and a decode rank without vLLM: real side channel, real Mooncake, plain memory as KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.assembly import DecodeRank, PrefillRank, make_decode_rank, make_prefill_rank, new_boot_id
from pdcluster_connector.core.ranges import GroupSlice
from pdcluster_connector.core.reception import Lost
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.device import Device
from pdcluster_connector.ending import end_parts
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import Cancel, ContentOrder, DecodeStep, Expect, PrefillStep, PushSlice, PushTarget
from pdcluster_connector.worker.prefill import PrefillWorker
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.secret import load_secret
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

SECRET: Final = load_secret({}, host="127.0.0.1")
LIFE: Final = BootId("one life")
"""Of the prefill engine."""
BLOCK_SIZE: Final = 16
HEAD_BYTES: Final = 64
_DRAWN_BYTES: Final = (1 << 20) + 7
"""Not a multiple of any block's size, so that the same bytes stand elsewhere in another block."""

STEP_S: Final = 45.0
"""For what must come of a push. Below the 60 s of settings that wait long, so that no deadline of theirs stands in for
what a test asks for; far above the second that it takes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one engine's KV cache."""

    num_layers: int = 4
    num_blocks: int = 64
    kv_heads: int = 2

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * HEAD_BYTES * self.kv_heads

    def layer_names(self) -> list[str]:
        return [f"layers.{number}" for number in range(self.num_layers)]


class Cache:
    """A KV cache of bytes: ``layers[layer, block]``."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers: npt.NDArray[np.uint8] = np.zeros((shape.num_layers, shape.num_blocks, shape.block_bytes), np.uint8)

    def fill(self, seed: int) -> None:
        """Random bytes, which come again after ``_DRAWN_BYTES``: no two blocks that follow each other are alike."""
        drawn, flat = np.random.default_rng(seed).bytes(_DRAWN_BYTES), self.layers.reshape(-1)
        for start in range(0, flat.size, _DRAWN_BYTES):
            part = flat[start : start + _DRAWN_BYTES]
            part[:] = np.frombuffer(drawn, np.uint8, part.size)

    def memory(self, fingerprint: KvFingerprint) -> Memory:
        """As ``register_kv_caches`` would see it."""
        base, shape = self.layers.ctypes.data, self.shape
        step = shape.num_blocks * shape.block_bytes
        regions = tuple(
            RegionLayout(
                name, 0, base + index * step, shape.num_blocks, shape.block_bytes, shape.block_bytes,
                RegionKind.HEADS, shape.kv_heads, BLOCK_SIZE,
            )
            for index, name in enumerate(shape.layer_names())
        )  # fmt: skip
        return Memory(RankLayout(0, 1, regions), ((base, self.layers.nbytes),), fingerprint, self.views())

    def views(self) -> tuple[torch.Tensor, ...]:
        """Of each layer ``[blocks, heads, tokens, bytes]``."""
        shape = self.shape.num_blocks, self.shape.kv_heads, BLOCK_SIZE, HEAD_BYTES
        return tuple(torch.from_numpy(layer).view(shape) for layer in self.layers)


def fingerprint_of(shape: Shape, **changed: object) -> KvFingerprint:
    """What two caches of this shape share."""
    values = {
        "model_digest": "m", "kv_dtype": "bytes", "layout": "LBHNC", "kv_heads": (shape.kv_heads,),
        "attention_backend": "none", "vllm_version": "0", "connector_version": "0", **changed,
    }  # fmt: skip
    return KvFingerprint(**values)  # type: ignore[arg-type]  # values are checked by the struct's users


def engine_facts(role: Role, shape: Shape, settings: Settings) -> EngineFacts:
    """One engine of TP 1 on this machine's CPU."""
    name = EngineId(role.name.lower())
    groups = (KvGroup(BLOCK_SIZE),)
    return EngineFacts(name, role, "127.0.0.1", 1, (shape.kv_heads,), "cpu", settings, SECRET, groups)


def blocks_slice(ours: Sequence[int], theirs: Sequence[int]) -> tuple[GroupSlice]:
    """Blocks ``ours`` of prefill for blocks ``theirs`` of decode. Where in the prompt they are is of no matter here."""
    return (GroupSlice(0, len(ours) * BLOCK_SIZE, tuple(ours), tuple(theirs)),)


def expect(name: str, num_blocks: int, deadline_ms: int, content: ContentOrder | None = None) -> Expect:
    """Decode's scheduler has reserved ``num_blocks`` blocks."""
    return Expect(RequestId(name), TransferId(name), deadline_ms, (((0, num_blocks * BLOCK_SIZE),),), content)


def content_of(blocks: Sequence[int], targets: Sequence[int] = ()) -> ContentOrder:
    """All that one engine has in ``blocks`` is compared. On prefill: ``targets`` are decode's blocks."""
    return ContentOrder((((0, len(blocks) * BLOCK_SIZE),),), (tuple(blocks),), targets=(tuple(targets),))


def push_slice(
    name: str,
    decode: SideChannelAddress,
    ours: Sequence[int],
    theirs: Sequence[int],
    *,
    is_last: bool = True,
    deadline_ms: int = 120_000,
    attempt: int = 1,
) -> PushSlice:
    """Blocks ``ours`` of prefill that become complete for blocks ``theirs`` of the decode rank at this address."""
    target = PushTarget(EngineId("decode"), 1, (decode,), deadline_ms)
    token = SECRET.mint(TransferId(name), Attempt(attempt), deadline_ms)
    request = RequestId(name), TransferId(name), Attempt(attempt)
    return PushSlice(*request, token, target, blocks_slice(ours, theirs), num_prompt_tokens=99, is_last=is_last)


def forward(worker: PrefillWorker, shape: Shape, step: PrefillStep) -> None:
    """One forward pass, of which every layer has a hook."""
    worker.begin_step(step)
    for name in shape.layer_names():
        worker.layer_saved(name)
    worker.end_step()


@contextmanager
def prefill_rank(
    cache: Cache,
    settings: Settings,
    *,
    device: Device | None = None,
    adapters: AdapterLoads | None = None,
    **facts: Any,
) -> Iterator[PrefillRank]:
    """A prefill rank over ``cache``. ``facts``: changed ones of its engine. ``device``: in place of the CPU."""
    ours = replace(engine_facts(Role.PREFILL, cache.shape, settings), **facts)
    rank = make_prefill_rank(ours, cache.memory(fingerprint_of(cache.shape)), device=device, adapters=adapters)
    try:
        yield rank
    finally:
        end_parts([rank])


@dataclass(slots=True)
class Pair:
    """A prefill rank beside a decode rank. Plays the forward thread of both."""

    prefill: PrefillRank
    decode: DecodeRank
    source: Cache
    target: Cache
    ended: dict[str, bool] = field(default_factory=dict)
    """Request id → whether it was received, for every request whose wait decode has ended."""
    released: set[str] = field(default_factory=set)
    """Requests whose blocks prefill may free."""
    losses: list[Lost] = field(default_factory=list)
    """Attempts that decode has given up."""
    retries: bool = False
    """Whether another attempt may follow a lost one; if not, the router's answer is that prefill has failed."""
    life: BootId = LIFE
    """Of the prefill engine."""

    def expect(self, name: str, num_blocks: int, *, deadline_ms: int = 120_000) -> None:
        """Decode's scheduler has reserved ``num_blocks`` blocks."""
        self.decode.worker.begin_step(DecodeStep(expects=(expect(name, num_blocks, deadline_ms),)))

    def compare(self, name: str, ours: Sequence[int], theirs: Sequence[int], *, deadline_ms: int = 120_000) -> None:
        """One forward pass pushes blocks ``ours`` of prefill into blocks ``theirs`` of decode; content is compared."""
        expected = expect(name, len(theirs), deadline_ms, content_of(theirs))
        self.decode.worker.begin_step(DecodeStep(expects=(expected,)))
        self.forward(msgspec.structs.replace(self.slice_of(name, ours, theirs), content=content_of(ours, theirs)))

    def cancel(self, name: str) -> None:
        """Decode's scheduler wants the wait to end."""
        self.decode.worker.begin_step(DecodeStep(cancels=(Cancel(RequestId(name), "cancelled by the test"),)))

    def slice_of(
        self,
        name: str,
        ours: Sequence[int],
        theirs: Sequence[int],
        *,
        is_last: bool = True,
        deadline_ms: int = 120_000,
        attempt: int = 1,
    ) -> PushSlice:
        """As ``push_slice``, for this decode rank."""
        return push_slice(
            name, self.decode.address, ours, theirs, is_last=is_last, deadline_ms=deadline_ms, attempt=attempt
        )

    def forward(self, *slices: PushSlice) -> None:
        """One forward pass that completes ``slices``, layer by layer."""
        forward(self.prefill.worker, self.source.shape, PrefillStep(self.life, slices))

    def require_received(self, name: str) -> None:
        """Decode gets all of the request's KV."""
        assert self.step_until(lambda: name in self.ended)
        assert self.ended[name]

    def require_lost(self, name: str) -> None:
        """Decode's wait for the request ends without its KV."""
        assert self.step_until(lambda: name in self.ended)
        assert not self.ended[name]

    def step(self, finished: Sequence[str] = ()) -> None:
        """Both engines ask their workers what has ended."""
        self.released |= self.prefill.worker.finished(map(RequestId, finished))
        receipts = self.decode.worker.receipts()
        for name in receipts.ended:
            assert name not in self.ended, f"{name} was reported twice"
            self.ended[name] = name not in receipts.failed
        for lost in self.decode.worker.losses():
            self.losses.append(lost)
            if not self.retries:
                self.cancel(lost.request_id)

    def step_until(self, is_true: Callable[[], bool], *, timeout_s: float = STEP_S) -> bool:
        """Whether the fact became true while both engines went on stepping."""
        return stepped_until(self.step, is_true, timeout_s)


def stepped_until(step: Callable[[], None], is_true: Callable[[], bool], timeout_s: float = STEP_S) -> bool:
    """Whether the fact became true while the engines went on stepping."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
        step()
    return True


@contextmanager
def make_pair(
    shape: Shape = Shape(),
    settings: Settings = Settings(quarantine_s=0.5, hold_s=0.5, lease_s=20.0, handshake_timeout_s=20.0),  # noqa: B008  # frozen
    *,
    changes: Mapping[Role, Callable[[Memory], Memory]] = MappingProxyType({}),
    devices: Mapping[Role, Device] = MappingProxyType({}),
    adapters: Mapping[Role, AdapterLoads] = MappingProxyType({}),
) -> Iterator[Pair]:
    """Both ranks run; closed at the end. ``changes``: of what a rank sees. ``devices``: in place of the CPU.
    ``adapters``: of engines that have some."""
    with ExitStack() as stack:
        source, target = Cache(shape), Cache(shape)
        source.fill(1)
        ours = fingerprint_of(shape)
        memories = {Role.PREFILL: source.memory(ours), Role.DECODE: target.memory(ours)}
        memories |= {role: change(memories[role]) for role, change in changes.items()}
        facts = {role: engine_facts(role, shape, settings) for role in Role}
        more: dict[Role, Any] = {it: {"device": devices.get(it), "adapters": adapters.get(it)} for it in Role}
        decode = make_decode_rank(facts[Role.DECODE], memories[Role.DECODE], **more[Role.DECODE])
        stack.callback(end_parts, [decode])
        prefill = make_prefill_rank(facts[Role.PREFILL], memories[Role.PREFILL], **more[Role.PREFILL])
        stack.callback(end_parts, [prefill])
        yield Pair(prefill, decode, source, target)


@contextmanager
def another_prefill(pair: Pair, settings: Settings, **facts: Any) -> Iterator[Pair]:
    """The same decode rank, pushed to by a second prefill engine. ``facts``: changed ones of it."""
    with prefill_rank(pair.source, settings, **facts) as rank:
        yield replace(pair, prefill=rank, life=new_boot_id())
