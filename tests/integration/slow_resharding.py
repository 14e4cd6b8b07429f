"""A prefill TP group with token-major KV in this process, each rank on a device whose streams run beside the host.

Real lanes, side channels and Mooncake; the exchange is a stream's work, as NCCL's is. Bytes of the model are 1 to 255,
decode's memory begins with zeros, and what was not computed yet is STALE. So a byte of decode that is neither zero nor
the model's came too early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fakes.async_device import STALE, AsyncRuntime, async_device
from fakes.stream_group import Meeting, StreamGroup
from fakes.streams import AsyncStream
from fakes.transports import Late, Wire, wrap_transports
from integration.ranks import LIFE, SECRET
from integration.reshard_cache import (
    BLOCK,
    KV_HEADS,
    NUM_LAYERS,
    REGIONS,
    RankCache,
    facts_of,
    layer_of,
    model_kv,
    prefill_cache,
)
from integration.reshard_pushes import DecodeEngine, Job
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.assembly import PrefillRank, make_prefill_rank
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.ending import end_parts
from pdcluster_connector.reshard.staging import StagingMemory
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler, Scheduled
from pdcluster_connector.settings import PushTiming, Settings
from pdcluster_connector.steps import PrefillStep
from pdcluster_connector.worker.orders import Quiesce
from pdcluster_connector.worker.resharding import TokenMemory
from pdcluster_protocol.ids import Attempt, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import ContentCheck, sealed, to_wire

PATIENT: Final = Settings(
    quarantine_s=0.5,
    hold_s=EDGE_S,
    lease_s=EDGE_S,
    handshake_timeout_s=EDGE_S,
    preempt_wait_s=EDGE_S,
    staging_bytes=8 << 20,
    reshard_timeout_s=20 * EDGE_S,
)
"""No deadline ends what a test holds back."""


@dataclass
class SlowRank:
    """One prefill rank and its device."""

    prefill: PrefillRank
    runtime: AsyncRuntime
    cache: RankCache
    wire: Wire

    @property
    def forward(self) -> AsyncStream:
        return self.runtime.default

    @property
    def exchange(self) -> AsyncStream:
        """The group's own stream."""
        return self.runtime.streams[1]

    @property
    def side(self) -> AsyncStream:
        """The resharder's."""
        return self.runtime.streams[2]

    @property
    def staging(self) -> StagingMemory:
        staging = self.prefill.worker._context.staging
        assert staging is not None
        return staging

    def compute(self, step: PrefillStep) -> None:
        """One forward pass: a kernel for each region of each layer, and vLLM's hook; the last layer has none."""
        worker = self.prefill.worker
        worker.begin_step(step)
        for layer in range(NUM_LAYERS):
            for region in (2 * layer, 2 * layer + 1):
                self.kernel(region, torch.from_numpy(model_kv(region)[:, :, self.cache.heads].copy()))
            if layer < NUM_LAYERS - 1:
                worker.layer_saved(layer_of(2 * layer))
        worker.end_step()

    def kernel(self, region: int, content: torch.Tensor) -> None:
        """The whole region gets ``content``. One operation."""
        self.runtime.tensor(torch.from_numpy(self.cache.regions[region])).copy_(content)

    def frees(self, *ended: str) -> bool:
        """vLLM has ended these requests. Whether it may free any blocks by now."""
        return bool(self.prefill.worker.finished(map(RequestId, ended)))

    def wait_until_lanes_are_quiet(self, job: Job) -> None:
        """Its lanes are open, and read nothing of it from its blocks."""
        for lane in self.prefill.worker._known_lanes():
            quiet = threading.Event()
            lane.post(Quiesce(PushKey(TransferId(job.name), Attempt(1)), quiet))
            assert quiet.wait(PATIENCE_S)


@dataclass
class SlowGroup:
    """All ranks of the prefill engine, its scheduler and one decode engine."""

    ranks: list[SlowRank]
    scheduler: PrefillScheduler
    decode: DecodeEngine
    jobs: dict[str, Job] = field(default_factory=dict)

    def add(self, name: str, num_tokens: int, first_block: int = 1, check: ContentCheck = ContentCheck.OFF) -> Job:
        """The router has brought the request to both engines."""
        blocks = tuple(range(first_block, first_block - (-num_tokens // BLOCK)))
        job = Job(name, self.decode, num_tokens, blocks, blocks[::-1], deadline_ms=int(PATIENCE_S * 1000), check=check)
        job.expect()
        parameters = to_wire(sealed(job.reservation(), SECRET))
        self.scheduler.add(RequestId(name), parameters, job.token_ids, now=time.monotonic())
        self.jobs[name] = job
        return job

    def forward(self, **computed: int) -> None:
        """All ranks are given a forward pass after which so many tokens of each request are computed."""
        scheduled = [Scheduled(RequestId(name), tokens) for name, tokens in computed.items()]
        step = self.scheduler.step(scheduled, (), lambda name: (self.jobs[name].prefill_blocks,), now=time.monotonic())
        for rank in self.ranks:
            rank.compute(step)

    def has_ended(self, job: Job) -> bool:
        """Whether no rank of decode waits for it any more."""
        self.decode.step()
        return bool(self.decode.outcomes(job.name))

    def has_ended_well(self, job: Job) -> bool:
        """Whether every rank of decode has received it, and every byte of it is right."""
        if not self.has_ended(job):
            return False
        assert self.decode.outcomes(job.name) == {True}
        assert is_exact(job)
        return True

    def has_nothing(self, job: Job) -> bool:
        """Whether decode got no byte of it."""
        return not any(found.any() for found, _ in bytes_of(job))

    def arrives(self, job: Job, *layers: int) -> bool:
        """Whether decode gets all of these layers, and no byte that is not the model's."""
        wanted = [region for layer in layers for region in (2 * layer, 2 * layer + 1)]
        assert until(lambda: has_wrong_bytes(job) or is_exact(job, wanted) or self.has_ended(job))
        return is_exact(job, wanted) and not has_wrong_bytes(job)


Bytes: TypeAlias = npt.NDArray[np.uint8]


def bytes_of(job: Job, regions: Sequence[int] = REGIONS) -> Iterator[tuple[Bytes, Bytes]]:
    """What each rank of decode has of the job in each region, and what it should have."""
    tokens = np.arange(job.num_tokens)
    ours, theirs = np.asarray(job.prefill_blocks), np.asarray(job.decode_blocks)
    for region in regions:
        model = model_kv(region)[ours[tokens // BLOCK], tokens % BLOCK]
        for cache in job.decode.caches:
            yield cache.regions[region][theirs[tokens // BLOCK], tokens % BLOCK], model[:, cache.heads]


def has_wrong_bytes(job: Job) -> bool:
    """Whether decode has a byte that is not the model's."""
    return any(bool(((found != 0) & (found != model)).any()) for found, model in bytes_of(job))


def is_exact(job: Job, regions: Sequence[int] = REGIONS) -> bool:
    return all(np.array_equal(found, model) for found, model in bytes_of(job, regions))


@contextmanager
def slow_group(
    prefill_tp: int, decode_tp: int, settings: Settings = PATIENT, *, is_held: bool = True, compares: bool = False
) -> Iterator[SlowGroup]:
    """Both engines. ``is_held``: prefill's forward passes do nothing before the test lets them.

    ``compares``: both can read their own KV.
    """
    with ExitStack() as stack:
        decode = DecodeEngine("decode-0", settings, decode_tp, BLOCK, 1, compares=compares)
        stack.callback(decode.close)
        meeting = Meeting(prefill_tp)
        made = (_slow_rank(rank, prefill_tp, meeting, settings, compares=compares) for rank in range(prefill_tp))
        ranks = [stack.enter_context(rank) for rank in made]
        for rank in ranks if is_held else ():
            rank.forward.hold()
        engine = PrefillEngine(prefill_tp, (KV_HEADS,), (KvGroup(BLOCK),))
        yield SlowGroup(ranks, PrefillScheduler(engine, PushTiming.LAYERWISE, SECRET, LIFE), decode)
        meeting.abort()


@contextmanager
def _slow_rank(rank: int, tp_size: int, meeting: Meeting, settings: Settings, *, compares: bool) -> Iterator[SlowRank]:
    with async_device() as (device, runtime), ExitStack() as stack:
        cache, wire = prefill_cache(rank, tp_size), Wire()
        for region in cache.regions:
            region[:] = STALE
        group = StreamGroup(meeting, rank, runtime)
        data = {
            index: runtime.tensor(torch.from_numpy(region.reshape(-1))) for index, region in enumerate(cache.regions)
        }
        tokens = TokenMemory(group.as_process_group(), dict(data))
        facts = facts_of(Role.PREFILL, "prefill", tp_size, BLOCK, settings)
        views = tuple(map(runtime.tensor, cache.views())) if compares else ()
        with runtime.default:
            prefill = make_prefill_rank(facts, replace(cache.memory(), views=views), tokens, device=device)
        stack.callback(end_parts, [prefill])
        stack.callback(runtime.release)
        wrap_transports(prefill.worker, lambda inner: Late(inner, wire))
        assert until(lambda: len(runtime.streams) == 3), "the resharder opens its stream"
        yield SlowRank(prefill, runtime, cache, wire)
