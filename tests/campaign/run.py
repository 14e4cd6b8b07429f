"""One campaign from the first process to the last block: what happens in which order.

expected answers -> engines, proxies, router -> state at the start -> load with faults -> quiet
    -> every question once more, at the router and at each engine -> state at the end
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Final

from campaign.build import QUIET_S, Built, Setup, build
from campaign.client import Order
from campaign.cluster import START_TIMEOUT_S, CannotStart, Cluster, Member
from campaign.findings import Ended, EngineState, Findings
from campaign.injector import Injected, Injector, faults_around, shown
from campaign.leftovers import ask_ranks
from campaign.load import Load
from campaign.questions import Answer, Question, ask_for_clear_answers, ask_single_engine, make_questions
from campaign.schedule import Fault, Site, make_faults, make_orders
from campaign.wire import read_troubles
from integration.harness import HttpError, metric
from pdcluster_cli.local.pool import PoolProcess, wait_ready
from pdcluster_cli.processes.zygote import Zygote

_CALM_S: Final = 3.0
"""After the last fault, until health probes have seen every engine again."""
_SAMPLE_S: Final = 2.0
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. ``rate``: requests in a second; ``every``: requests between two faults."""

    num_requests: int
    seed: int
    concurrency: int
    rate: float
    every: int


@dataclass(slots=True)
class Record:
    """Everything that a report is made of."""

    options: Options
    findings: Findings = field(default_factory=Findings)
    injected: list[Injected] = field(default_factory=list)
    troubles: Counter[str] = field(default_factory=Counter)
    preemptions: dict[tuple[str, int], float] = field(default_factory=dict)
    """Engine and life to how often it preempted."""
    lives: dict[str, int] = field(default_factory=dict)
    num_questions: int = 0
    """Those whose answers are clear enough for these engines."""
    pids: set[tuple[int, str]] = field(default_factory=set)
    ports: tuple[int, ...] = ()
    began_at: float = field(default_factory=time.monotonic)


async def run(options: Options, setup: Setup, zygote: Zygote) -> Record:
    """The record of a whole campaign; the zygote's processes still run."""
    record, built = Record(options), build(setup)
    record.ports = built.ports
    expected = await asyncio.to_thread(_expected, setup, zygote, built.ports[0])
    cluster = Cluster(zygote)
    cluster.members = built.members
    try:
        await _campaign(record, setup, built, cluster, expected)
    except* CannotStart as broken:
        record.findings.breakdown = "; ".join(map(str, broken.exceptions))
    finally:
        await cluster.close()
        await built.metaserver.close()
    record.findings.deaths = [f"{death.name} {death.how}" for death in cluster.deaths]
    record.lives = {member.name: member.lives for member in cluster.members}
    record.pids = cluster.pids
    return record


def _expected(setup: Setup, zygote: Zygote, port: int) -> dict[Question, Answer]:
    engine = zygote.start_engine(setup.single_engine(port))
    try:
        single = [PoolProcess(engine.spec.name, port, engine)]
        wait_ready(single, single, lambda _: None, deadline=time.monotonic() + START_TIMEOUT_S)
        return expected_of(f"http://127.0.0.1:{port}", setup)
    finally:
        engine.stop(5.0)


def expected_of(url: str, setup: Setup) -> dict[Question, Answer]:
    """What the single engine at ``url`` says. Logprobs only where ranks round otherwise than it does."""
    if not setup.rounding:
        return ask_single_engine(url, make_questions())
    return ask_for_clear_answers(url, make_questions(), setup.rounding)


async def _campaign(
    record: Record, setup: Setup, built: Built, cluster: Cluster, expected: Mapping[Question, Answer]
) -> None:
    await built.metaserver.listen()
    await cluster.start(*cluster.members)
    record.findings.at_start = await _states(cluster)
    injector = Injector(cluster, built.metaserver, setup.storm_file, setup.trouble_log)
    load = Load(cluster.router, expected, f"campaign-{record.options.seed}")
    record.num_questions = len(expected)
    try:
        async with asyncio.TaskGroup() as watchers:
            watching = [watchers.create_task(cluster.watch()), watchers.create_task(_sample(record, cluster))]
            await load.run(*_plan(record.options, setup, tuple(expected)), injector.inject)
            await asyncio.sleep(_CALM_S)
            await _ask_afterwards(record.findings, cluster, expected)
            record.findings.at_end = await _settled(cluster, record.findings.at_start)
            for watcher in watching:
                watcher.cancel()
    finally:
        record.injected = injector.log
        record.troubles = Counter(one.trouble for one in read_troubles(setup.trouble_log))
        record.findings.requests = _explained(load.ended, injector.log, setup, record.began_at)


def _plan(
    options: Options, setup: Setup, questions: Sequence[Question]
) -> tuple[tuple[Order, ...], int, tuple[Fault, ...]]:
    orders = make_orders(options.seed, options.num_requests, questions, rate=options.rate)
    faults = make_faults(options.seed, options.num_requests, every=options.every, split=setup.split)
    return orders, options.concurrency, faults


async def _ask_afterwards(findings: Findings, cluster: Cluster, expected: Mapping[Question, Answer]) -> None:
    """Every question at the router, and a long one at each engine: an engine answers alone, too."""
    load = Load(cluster.router, expected, "afterwards")
    orders = [Order(index, question, index % 2 == 0) for index, question in enumerate(expected)]
    await load.run_all(orders, concurrency=4)
    for number, engine in enumerate(cluster.engines):
        load.ended.append(await load.ask(Order(len(orders) + number, orders[-1].question, False), engine.port))
    findings.afterwards = load.ended


async def _settled(cluster: Cluster, wanted: Mapping[str, EngineState]) -> dict[str, EngineState]:
    """The states, as soon as they are as they were; what they are when the quiet time is over."""
    deadline = time.monotonic() + QUIET_S
    while (states := await _states(cluster)) != wanted and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    return states


async def _states(cluster: Cluster) -> dict[str, EngineState]:
    states = await asyncio.gather(*(asyncio.to_thread(_state, member) for member in cluster.members))
    return dict(zip((member.name for member in cluster.members), states, strict=True))


def _state(member: Member) -> EngineState:
    try:
        if member.site is Site.ROUTER:
            return EngineState(
                num_running=metric(f"http://127.0.0.1:{member.internal_port}", "pdcluster_router_in_flight")
            )
        return EngineState(
            used_share=metric(member.url, "vllm:kv_cache_usage_perc"),
            num_running=metric(member.url, "vllm:num_requests_running"),
            num_waiting=metric(member.url, "vllm:num_requests_waiting"),
            left=ask_ranks(member.url),
        )
    except (OSError, HTTPException, HttpError, KeyError) as error:
        return EngineState(problem=f"{type(error).__name__} {error}")


async def _sample(record: Record, cluster: Cluster) -> None:
    """Preemptions are counted while an engine lives: a killed one takes its counter along."""
    while True:
        for engine in cluster.engines:
            with contextlib.suppress(OSError, HTTPException, HttpError, KeyError):
                count = await asyncio.to_thread(metric, engine.url, "vllm:num_preemptions_total")
                record.preemptions[engine.name, engine.lives] = count
        await asyncio.sleep(_SAMPLE_S)


def _explained(requests: list[Ended], log: list[Injected], setup: Setup, zero: float) -> list[Ended]:
    """Bad ends with what was broken around them."""
    troubles = read_troubles(setup.trouble_log)
    explained = []
    for ended in requests:
        if ended.is_bad:
            lines = [shown(injected, zero) for injected in faults_around(log, ended.begin, ended.end)]
            met = [
                f"{one.at - zero:.2f} s {one.who}: {one.trouble}"
                for one in troubles
                if ended.begin <= one.at <= ended.end
            ]
            ended = dataclasses.replace(ended, faults=(*lines, *met))
        explained.append(ended)
    return explained
