"""Prefill and decode ranks without vLLM: real side channel, real Mooncake, plain memory as KV cache.

Only this file of the rank benchmarks knows how a rank is built and what its forward thread calls. Its users pass
``KvShape``, block tables and names.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from benchmarks.block_tables import BlockTable
from benchmarks.kv_shape import KvShape

from pdcluster_connector.assembly import DecodeRank, PrefillRank, make_decode_rank, make_prefill_rank
from pdcluster_connector.core.ranges import GroupSlice
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.device import CpuDevice, Device, DeviceEvent
from pdcluster_connector.ending import end_parts
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_connector.steps import Cancel, ContentOrder, DecodeStep, Expect, PrefillStep, PushSlice, PushTarget
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import ContentCheck, SideChannelAddress
from pdcluster_protocol.secret import SECRET_VARIABLE, load_secret
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout

LEASE_S: Final = 20.0
"""No measurement is about leases, and a crowded machine may give a rank no time for seconds."""
DEADLINE_MS: Final = 30_000
"""Decode remembers an ended transfer for this time: much longer than a transfer takes, much shorter than a soak."""
_PAGE_BYTES: Final = 4096
_DECODE: Final = EngineId("decode")
_LIFE: Final = BootId("one life")
"""The boot id of the prefill engine."""
_SECRET: Final = load_secret({SECRET_VARIABLE: "the secret of the benchmarks"}, host="0.0.0.0")


class Cache:
    """One rank's KV memory: anonymous memory of which every page has been touched."""

    device_type = "cpu"
    views: tuple[torch.Tensor, ...]
    """One tensor for each layer, as in ``Memory.views``."""

    def __init__(self, shape: KvShape, tp_size: int) -> None:
        self.shape = shape
        self.tp_size = tp_size
        self.num_bytes = shape.rank_bytes(tp_size)
        self.memory = mmap.mmap(-1, self.num_bytes)
        for at in range(0, self.num_bytes, _PAGE_BYTES):
            self.memory[at] = at // _PAGE_BYTES % 256
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        layers = torch.frombuffer(self.memory, dtype=torch.uint8).view(shape.num_layers, -1)
        pages = shape.num_blocks, shape.kv_heads // tp_size, shape.block_size, shape.head_bytes
        self.views = tuple(layer.view(pages) for layer in layers)

    def layout(self, rank: int) -> RankLayout:
        """The layout of rank ``rank``: one region for each layer."""
        shape, block_bytes = self.shape, self.shape.block_bytes(self.tp_size)
        regions = tuple(
            RegionLayout(
                layer_name=name,
                group=0,
                base=self.address + index * shape.num_blocks * block_bytes,
                num_blocks=shape.num_blocks,
                page_stride=block_bytes,
                page_bytes=block_bytes,
                kind=RegionKind.HEADS,
                heads=shape.kv_heads,
                page_tokens=shape.block_size,
            )
            for index, name in enumerate(shape.layer_names())
        )
        return RankLayout(rank, self.tp_size, regions)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a step: its name, and its blocks on both sides, by position."""

    name: str
    prefill_blocks: BlockTable
    decode_blocks: BlockTable
    check: ContentCheck = ContentCheck.OFF
    """How much of the request's content is compared."""


class _SavedLayer:
    """The event of a saved layer. On CPU a layer is final when the hook is called."""

    def query(self) -> bool:
        """Always True: see ``CpuDevice``."""
        return True


class CountingDevice(CpuDevice):
    """Counts the batches that a rank's lanes take: ``WriteQueue`` asks whether a layer is done before it takes a batch.

    On CPU the answer is always yes, so the queue asks once for each batch. Events of gathered strips do not count.
    """

    def __init__(self) -> None:
        self._count_lock = threading.Lock()
        self.num_batches = 0

    def record(self) -> DeviceEvent:
        return _SavedLayer()

    def is_done(self, event: DeviceEvent) -> bool:
        with self._count_lock:
            self.num_batches += isinstance(event, _SavedLayer)
        return super().is_done(event)


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """A prefill rank; its owner is the forward thread."""

    rank: PrefillRank
    shape: KvShape
    device: Device

    @property
    def num_batches(self) -> int:
        """Batches that the rank's lanes have taken so far: at best one for each layer, step and lane.

        0 unless ``device`` is a ``CountingDevice``.
        """
        return self.device.num_batches if isinstance(self.device, CountingDevice) else 0

    def forward(
        self,
        requests: Sequence[Request],
        decode: tuple[SideChannelAddress, ...],
        compute: Callable[[int], object] = lambda _layer: None,
    ) -> None:
        """One forward pass that completes ``requests``. Calls ``compute`` for each layer. Waits for no network."""
        worker = self.rank.worker
        worker.begin_step(PrefillStep(_LIFE, tuple(_slice_of(request, self.shape, decode) for request in requests)))
        for layer, name in enumerate(self.shape.layer_names()):
            compute(layer)
            worker.layer_saved(name)
        worker.end_step()

    def release(self, names: Sequence[str]) -> set[str]:
        """Says that vLLM has ended ``names``. Returns requests whose blocks are no longer read, each one once."""
        return set(self.rank.worker.finished(map(RequestId, names)))

    def close(self) -> None:
        """Waits up to 7 s."""
        end_parts([self.rank])


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """A decode rank; its owner is the forward thread."""

    rank: DecodeRank
    shape: KvShape

    @property
    def address(self) -> SideChannelAddress:
        return self.rank.address

    def expect(self, requests: Sequence[Request]) -> None:
        """The scheduler has reserved the requests' blocks."""
        self.rank.worker.begin_step(DecodeStep(expects=tuple(_expect_of(request, self.shape) for request in requests)))

    def cancel(self, name: str, reason: str) -> None:
        """No push may complete the request any more."""
        self.rank.worker.begin_step(DecodeStep(cancels=(Cancel(RequestId(name), reason),)))

    def take_lost(self) -> dict[str, str]:
        """Requests that lost an attempt since the last call, and why."""
        return {lost.request_id: lost.reason for lost in self.rank.worker.losses()}

    def take_ended(self) -> dict[str, bool]:
        """Requests whose wait has ended since the last call, and whether their KV has come."""
        receipts = self.rank.worker.receipts()
        return {name: name not in receipts.failed for name in receipts.ended}

    def close(self) -> None:
        """Waits up to 7 s."""
        end_parts([self.rank])


def open_prefill(
    cache: Cache,
    rank: int,
    host: str,
    trace_file: str = "",
    device: Device | None = None,
    timing: PushTiming = PushTiming.LAYERWISE,
) -> PrefillEnd:
    """A prefill rank over ``cache`` that pushes from ``host``. ``device``: the cache's; None: ``CountingDevice``.

    Raises:
        ConfigError: The transport cannot start.
    """
    settings = Settings(trace_file=trace_file, push=timing, lease_s=LEASE_S)
    facts, device = _facts(Role.PREFILL, cache, host, settings), device or CountingDevice()
    return PrefillEnd(make_prefill_rank(facts, _memory(cache, rank), device=device), cache.shape, device)


def open_decode(cache: Cache, rank: int, host: str) -> DecodeEnd:
    """A decode rank over ``cache`` that listens on ``host``.

    Raises:
        ConfigError: The transport cannot start.
    """
    facts = _facts(Role.DECODE, cache, host, Settings(lease_s=LEASE_S))
    return DecodeEnd(make_decode_rank(facts, _memory(cache, rank)), cache.shape)


def _facts(role: Role, cache: Cache, host: str, settings: Settings) -> EngineFacts:
    shape = cache.shape
    return EngineFacts(
        engine_id=EngineId(role.name.lower()),
        role=role,
        host=host,
        tp_size=cache.tp_size,
        kv_heads=(shape.kv_heads,),
        device_type=cache.device_type,
        settings=settings,
        secret=_SECRET,
        groups=(KvGroup(shape.block_size),),
    )


def _memory(cache: Cache, rank: int) -> Memory:
    spans = ((cache.address, cache.num_bytes),)
    return Memory(cache.layout(rank), spans, _fingerprint(cache.shape), cache.views)


def _fingerprint(shape: KvShape) -> KvFingerprint:
    return KvFingerprint(
        model_digest="benchmark",
        kv_dtype="bytes",
        layout="LBHNC",
        kv_heads=(shape.kv_heads,),
        attention_backend="none",
        vllm_version="none",
        connector_version="benchmark",
    )


def _expect_of(request: Request, shape: KvShape) -> Expect:
    spans = ((0, len(request.decode_blocks) * shape.block_size),)
    content = None
    if request.check is not ContentCheck.OFF:
        content = ContentOrder((spans,), (request.decode_blocks,), request.check)
    return Expect(RequestId(request.name), TransferId(request.name), DEADLINE_MS, (spans,), content=content)


def _slice_of(request: Request, shape: KvShape, decode: tuple[SideChannelAddress, ...]) -> PushSlice:
    transfer, attempt = TransferId(request.name), Attempt(1)
    num_tokens = len(request.prefill_blocks) * shape.block_size
    ours, theirs = (request.prefill_blocks,), (request.decode_blocks,)
    content = None
    if request.check is not ContentCheck.OFF:
        content = ContentOrder((((0, num_tokens),),), ours, request.check, theirs)
    return PushSlice(
        request_id=RequestId(request.name),
        transfer_id=transfer,
        attempt=attempt,
        attempt_token=_SECRET.mint(transfer, attempt, DEADLINE_MS),
        target=PushTarget(_DECODE, len(decode), decode, DEADLINE_MS),
        groups=(GroupSlice(0, num_tokens, request.prefill_blocks, request.decode_blocks),),
        num_prompt_tokens=num_tokens,
        is_last=True,
        content=content,
    )
