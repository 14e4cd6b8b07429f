"""A prefill TP group that holds token-major KV, each rank a process, and decode engines of any TP in this process.

Real side channel, Mooncake and gloo on loopback; the steps are made by the real prefill scheduler, from reservations.
The model's whole KV is random and known to the test: ``model_kv(region)[block, token, head, byte]``; a prefill rank
holds its heads of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from integration.forked import forking_context
from integration.ranks import LIFE, SECRET, stepped_until
from integration.reshard_cache import (
    BLOCK,
    CELL_BYTES,
    KV_HEADS,
    NUM_BLOCKS,
    NUM_LAYERS,
    REGIONS,
    RankCache,
    facts_of,
    layer_of,
    model_kv,
    prefill_cache,
)
from patience import PATIENCE_S
from pdcluster_connector.core.tp_mapping import Sharding
from pdcluster_connector.core.watermark import KvGroup, wanted_spans
from pdcluster_connector.ending import end_parts
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler, Scheduled
from pdcluster_connector.settings import PushTiming, Settings, parse_settings
from pdcluster_connector.steps import Cancel, ContentOrder, DecodeStep, Expect, PrefillStep
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import ContentCheck, Reservation, sealed, to_wire
from pdcluster_protocol.prompt_digest import digest_prompt

if TYPE_CHECKING:
    from pdcluster_connector.assembly import DecodeRank, PrefillRank

END_S: Final = 60.0
QUICK: Final = parse_settings(
    {"quarantine_s": 0.5, "hold_s": 0.5, "lease_s": 20, "handshake_timeout_s": 20, "staging_bytes": 8 << 20}
)
"""As the product checks them: with a shorter reshard_timeout_s a busy machine loses pushes that only wait for a CPU."""


class DecodeEngine:
    """All ranks of one decode engine. Blocks are ``pages_per_block`` pages of ``page_tokens`` tokens."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        tp_size: int,
        page_tokens: int,
        pages_per_block: int,
        num_stages: int = 1,
        *,
        compares: bool = False,
    ) -> None:
        """``compares``: it can read its own KV."""
        from pdcluster_connector.assembly import make_decode_rank

        self.name, self.tp_size, self.page_tokens, self.num_stages = name, tp_size, page_tokens, num_stages
        self.block_tokens = page_tokens * pages_per_block
        self.caches = [
            replace(self._cache(rank, page_tokens, pages_per_block), stage=stage, num_stages=num_stages)
            for stage in range(num_stages)
            for rank in range(tp_size)
        ]
        facts = facts_of(Role.DECODE, name, tp_size, self.block_tokens, settings)
        facts = replace(facts, num_stages=num_stages)
        memories = [replace(cache.memory(), views=cache.views() if compares else ()) for cache in self.caches]
        self.ranks: list[DecodeRank] = [make_decode_rank(facts, memory) for memory in memories]
        self.ended: dict[tuple[str, int], bool] = {}
        """(request, rank) → whether it was received."""
        self.losses: list[tuple[str, int, str]] = []
        """(request, rank, reason) of each attempt that was given up."""

    def _cache(self, rank: int, page_tokens: int, pages_per_block: int) -> RankCache:
        num_heads = len(Sharding(self.tp_size, KV_HEADS).heads_of(rank))
        shape = (NUM_BLOCKS, self.block_tokens, num_heads)
        regions = [np.zeros((*shape, CELL_BYTES[region % 2]), np.uint8) for region in REGIONS]
        return RankCache(rank, self.tp_size, page_tokens, pages_per_block, regions)

    def cancel(self, name: str, ranks: Sequence[int] | None = None) -> None:
        """Decode's scheduler wants the wait to end; on ``ranks`` only, to see one of them go first."""
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.ranks[rank].worker.begin_step(DecodeStep(cancels=(Cancel(RequestId(name), "cancelled by the test"),)))

    def step(self) -> None:
        for rank, decode in enumerate(self.ranks):
            receipts = decode.worker.receipts()
            for name in receipts.ended:
                assert (name, rank) not in self.ended, f"{name} was reported twice"
                self.ended[name, rank] = name not in receipts.failed
            for lost in decode.worker.losses():
                self.losses.append((lost.request_id, rank, lost.reason))
                self.cancel(lost.request_id)

    def outcomes(self, name: str) -> set[bool]:
        """Of every rank, once all have one."""
        found = [self.ended[name, rank] for rank in range(len(self.ranks)) if (name, rank) in self.ended]
        return set(found) if len(found) == len(self.ranks) else set()

    def close(self) -> None:
        end_parts(self.ranks)


@dataclass(frozen=True)
class Job:
    """One request: where its prompt lies on both engines. ``cached``: leading tokens that decode has.

    ``check``: what of its content is compared.
    """

    name: str
    decode: DecodeEngine
    num_tokens: int
    prefill_blocks: tuple[int, ...]
    decode_blocks: tuple[int, ...]
    cached: int = 0
    deadline_ms: int = 120_000
    check: ContentCheck = ContentCheck.OFF

    @property
    def token_ids(self) -> list[int]:
        return list(range(self.num_tokens))

    def expect(self) -> None:
        """Decode's scheduler has reserved the blocks."""
        spans = wanted_spans(KvGroup(self.decode.block_tokens), self.cached, self.num_tokens, self.decode_blocks)
        content = ContentOrder((spans,), (self.decode_blocks,), self.check)
        order = None if self.check is ContentCheck.OFF else content
        expect = Expect(RequestId(self.name), TransferId(self.name), self.deadline_ms, (spans,), order)
        for rank in self.decode.ranks:
            rank.worker.begin_step(DecodeStep(expects=(expect,)))

    def reservation(self) -> Reservation:
        decode, transfer = self.decode, TransferId(self.name)
        first = decode.ranks[0].address
        return Reservation(
            request_id=self.name, remote_block_ids=(self.decode_blocks,), remote_block_size=decode.block_tokens,
            remote_page_sizes=(decode.page_tokens,), remote_engine_id=EngineId(decode.name), remote_host=first.host,
            remote_port=first.port, remote_tp_size=decode.tp_size, remote_pp_size=decode.num_stages,
            remote_cached_tokens=self.cached,
            transfer_id=transfer, attempt=Attempt(1), deadline_ms=self.deadline_ms,
            token=SECRET.mint(transfer, Attempt(1), self.deadline_ms), remote_boot_id=first.boot_id,
            remote_side_channels=tuple(rank.address for rank in decode.ranks), num_prompt_tokens=self.num_tokens,
            prompt_digest=digest_prompt(self.token_ids), content_check=self.check,
        )  # fmt: skip

    def require_exact(self) -> None:
        """Every byte of the prompt that decode lacked is the model's."""
        tokens = np.arange(self.cached, self.num_tokens)
        ours, theirs = np.asarray(self.prefill_blocks), np.asarray(self.decode_blocks)
        block = self.decode.block_tokens
        for region in REGIONS:
            model = model_kv(region)[ours[tokens // BLOCK], tokens % BLOCK]
            for cache in (cache for cache in self.decode.caches if cache.holds(region)):
                found = cache.regions[region][theirs[tokens // block], tokens % block]
                assert np.array_equal(found, model[:, cache.heads]), (self.name, region, cache.tp_rank)

    def require_untouched(self) -> None:
        """Nothing was written into the blocks of the cached tokens."""
        kept = list(self.decode_blocks[: self.cached // self.decode.block_tokens])
        assert not any(cache.regions[region][kept].any() for cache in self.decode.caches for region in REGIONS)


@dataclass
class FarRank:
    """Steers one prefill rank's process."""

    process: BaseProcess
    pipe: Connection

    def ask(self, *said: object) -> Any:
        self.pipe.send(said)
        assert self.pipe.poll(END_S), "a rank says nothing"
        return self.pipe.recv()


@dataclass
class PrefillGroup:
    """All ranks of the prefill engine, and its scheduler."""

    ranks: list[FarRank]
    scheduler: PrefillScheduler
    decodes: list[DecodeEngine]
    jobs: dict[str, Job] = field(default_factory=dict)
    released: dict[int, set[str]] = field(default_factory=dict)
    """By rank: requests whose blocks it holds no more."""

    @property
    def living(self) -> list[tuple[int, FarRank]]:
        return [(number, rank) for number, rank in enumerate(self.ranks) if rank.process.is_alive()]

    def add(self, job: Job, *, is_expected: bool = True) -> Job:
        """The router has brought the request to both engines; decode's workers know it, unless they are late."""
        self.jobs[job.name] = job
        if is_expected:
            job.expect()
        self.scheduler.add(
            RequestId(job.name), to_wire(sealed(job.reservation(), SECRET)), job.token_ids, now=time.monotonic()
        )
        return job

    def forward(self, computed: Mapping[str, int], preempted: Sequence[str] = ()) -> None:
        """One forward pass, after which so many tokens of each request are computed. Does not wait for its writes."""
        scheduled = [Scheduled(RequestId(name), tokens) for name, tokens in computed.items()]
        step = self.scheduler.step(
            scheduled, map(RequestId, preempted), lambda name: (self.jobs[name].prefill_blocks,), now=time.monotonic()
        )
        for _, rank in self.living:
            rank.pipe.send(("forward", step))

    def finish(self, *names: str) -> None:
        """vLLM has ended the requests on prefill."""
        for name in names:
            self.scheduler.finish(RequestId(name))
        self._ask_finished(names)

    def step(self) -> None:
        self._ask_finished(())
        for decode in self.decodes:
            decode.step()

    def step_until(self, is_true: Callable[[], bool], timeout_s: float = 45.0) -> bool:
        """Whether the fact became true while all engines went on stepping."""
        return stepped_until(self.step, is_true, timeout_s)

    def outcomes(self, *names: str) -> list[set[bool]]:
        return [self.jobs[name].decode.outcomes(name) for name in names]

    def are_released(self, *names: str) -> bool:
        """Whether every living rank has named each of these requests as free."""
        return all(set(names) <= self.released.get(number, set()) for number, _ in self.living)

    def require_no_staging_taken(self) -> None:
        assert self.step_until(lambda: all(rank.ask("is_idle") for _, rank in self.living), PATIENCE_S)

    def _ask_finished(self, names: Sequence[str]) -> None:
        for number, rank in self.living:
            free = rank.ask("finished", tuple(names))
            assert not free & self.released.setdefault(number, set()), "a request was freed twice"
            self.released[number] |= free


@contextmanager
def prefill_group(
    tp_size: int, decodes: Sequence[tuple[int, ...]], folder: Path, settings: Settings = QUICK
) -> Iterator[PrefillGroup]:
    """A prefill engine of ``tp_size`` and decode engines: (TP size, tokens in a page, pages in a block[, stages])."""
    context = forking_context()
    with ExitStack() as stack:
        ranks = []
        for rank in range(tp_size):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=_serve, args=(rank, tp_size, str(folder / "store"), settings, theirs), daemon=True
            )
            process.start()
            stack.callback(process.join, END_S)
            stack.callback(process.kill)
            theirs.close()
            ranks.append(FarRank(process, ours))
        engines = []
        for number, decode in enumerate(decodes):
            engines.append(DecodeEngine(f"decode-{number}", settings, *decode))
            stack.callback(engines[-1].close)
        for far in ranks:
            assert far.pipe.poll(END_S)
            assert far.pipe.recv() == "ready"
        prefill = PrefillEngine(tp_size, (KV_HEADS,), (KvGroup(BLOCK),))
        yield PrefillGroup(ranks, PrefillScheduler(prefill, PushTiming.LAYERWISE, SECRET, LIFE), engines)


def _serve(rank: int, tp_size: int, store: str, settings: Settings, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    prefill, cache = _start(rank, tp_size, store, settings)
    worker = prefill.worker
    pipe.send("ready")
    while True:
        try:
            kind, *said = pipe.recv()
        except EOFError:
            return
        match kind:
            case "forward":
                _forward(prefill, cache, said[0])
            case "finished":
                pipe.send({str(name) for name in worker.finished(map(RequestId, said[0]))})
            case "pause":
                time.sleep(said[0])
            case "is_idle":
                staging = worker._context.staging
                pipe.send(staging is not None and staging.is_idle)
            case "close":
                end_parts([prefill])
                pipe.send("closed")


def _forward(prefill: PrefillRank, cache: RankCache, step: PrefillStep) -> None:
    """The blocks of preempted requests are overwritten at once; the next step that pushes has computed all again."""
    if step.preempted:
        prefill.worker.protect_preempted(step.preempted)
    for region, data in enumerate(cache.regions) if step.preempted or step.slices else ():
        data[:] = 0 if step.preempted else model_kv(region)[:, :, cache.heads]
    prefill.worker.begin_step(step)
    for layer in range(NUM_LAYERS - 1):  # the last one has no hook
        prefill.worker.layer_saved(layer_of(2 * layer))
    prefill.worker.end_step()


def _start(rank: int, tp_size: int, store: str, settings: Settings) -> tuple[PrefillRank, RankCache]:
    import torch
    import torch.distributed as dist

    from pdcluster_connector.assembly import make_prefill_rank
    from pdcluster_connector.reshard.tensors import open_reshard_group
    from pdcluster_connector.worker.resharding import TokenMemory

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.FileStore(store, tp_size), rank=rank, world_size=tp_size
    )
    cache = prefill_cache(rank, tp_size)
    data = {index: torch.from_numpy(region.reshape(-1)) for index, region in enumerate(cache.regions)}
    tokens = TokenMemory(open_reshard_group(range(tp_size), settings.reshard_timeout_s), data)
    facts = facts_of(Role.PREFILL, "prefill", tp_size, BLOCK, settings)
    return make_prefill_rank(facts, cache.memory(), tokens), cache
