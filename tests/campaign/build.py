"""Which processes a campaign has and how each is set up: names, ports, command lines. Starts nothing.

Two of each role, and no two alike: prefix caching on and off on either side, one prefill engine whose cache is so
small that it preempts, one decode engine that fails what did not come and one that recomputes it. Caches are small
everywhere, so that freed blocks are soon somebody else's.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from campaign.cluster import Member, stable_ports
from campaign.leftovers import LEFTOVERS
from campaign.proxy import FaultProxy
from campaign.questions import BLOCK_SIZE
from campaign.schedule import Site
from campaign.wire import ODDS, WireSettings
from integration.harness import BASE_ARGS
from integration.kv_probe import PROBE_ENV
from pdcluster_cli.processes.engines import ROUTER_MODULE, EnginePlan, PoolRole, engine_spec, router_argv
from pdcluster_cli.processes.parallelism import ParallelSizes
from pdcluster_cli.processes.zygote import EngineSpec
from pdcluster_connector.settings import Settings
from pdcluster_protocol.params import ContentCheck
from pdcluster_router import __main__ as router_command

REQUEST_TIMEOUT_S: Final = 20.0
"""The router's limit for a request without its own."""
CONNECTOR: Final = "campaign.faulty_connector:FaultyConnector"
"""Module and class."""
TP_ROUNDING: Final = 1e-3
"""Ranks add up their parts in another order. As in ``zoo/pools.py``."""
QUIET_S: Final = 30.0
"""How long after the last fault every block must be back."""

_CONNECTOR: Final[dict[str, object]] = {
    "handshake_timeout_s": 2.0,
    "quarantine_s": 3.0,
    "preempt_wait_s": 1.0,
    "lease_s": 2.0,
    "hold_s": 3.0,
}
"""Short limits, so that a campaign is quick. Those that the connector does not have (yet) are left out."""
_ROUTER: Final = {"--request-timeout": REQUEST_TIMEOUT_S, "--prefill-timeout": 6.0, "--connect-timeout": 1.0}
"""The same for the router."""

_SIZE: Final = ("--block-size", str(BLOCK_SIZE), "--max-model-len", "345", "--max-num-batched-tokens", "128")
_PROBE: Final = ("--worker-extension-cls", LEFTOVERS)
_NO_CACHE: Final = ("--no-enable-prefix-caching",)
_IN_PIECES: Final = ("--long-prefill-token-threshold", "32")
_TIGHT_BYTES: Final = 3 << 19
"""1.5 MiB hold 384 tokens: not two of the longest prompts, while pieces of 32 tokens let four begin at once."""
_SMALL_BYTES: Final = 10 << 20
"""10 MiB hold 2,560 tokens: eight of the longest requests."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What sets one engine apart. ``cache_bytes``: of all its ranks together. ``policy``: what a decode engine does
    with a request whose KV did not come."""

    role: PoolRole
    cache_bytes: int
    args: tuple[str, ...] = ()
    policy: str = "fail"


ENGINES: Final = (
    Kind(PoolRole.PREFILL, _SMALL_BYTES),
    Kind(PoolRole.PREFILL, _TIGHT_BYTES, _IN_PIECES + _NO_CACHE),
    Kind(PoolRole.DECODE, _SMALL_BYTES),
    Kind(PoolRole.DECODE, _SMALL_BYTES, _NO_CACHE, policy="recompute"),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all members share."""

    model: Path
    folder: Path
    seed: int
    connector: str = CONNECTOR
    """Of the prefill engines."""
    content_check: ContentCheck = ContentCheck.SAMPLED
    """What decode engines compare."""
    prefill_tp: int = 1
    decode_tp: int = 1

    @property
    def storm_file(self) -> Path:
        return self.folder / "storm"

    @property
    def trouble_log(self) -> Path:
        return self.folder / "trouble.log"

    def tp_of(self, role: PoolRole) -> int:
        """Over how many ranks an engine of this role is split."""
        return self.prefill_tp if role is PoolRole.PREFILL else self.decode_tp

    @property
    def split(self) -> tuple[Site, ...]:
        """The sites whose engines have several ranks."""
        return tuple(Site(role.value) for role in (PoolRole.PREFILL, PoolRole.DECODE) if self.tp_of(role) > 1)

    @property
    def rounding(self) -> float:
        """How far the logprobs of a split engine may be from those of the single one."""
        return TP_ROUNDING if self.split else 0.0

    def single_engine(self, port: int) -> EngineSpec:
        """The engine whose answers are right."""
        args = (*BASE_ARGS, *_SIZE)
        return engine_spec(
            EnginePlan("single", PoolRole.SINGLE, self.model, port, self.folder / "single.log", args=args)
        )


@dataclass(frozen=True, slots=True)
class Built:
    """Everybody, nobody started. ``metaserver``: the proxy by which decode engines reach the router."""

    members: list[Member]
    metaserver: FaultProxy
    ports: tuple[int, ...]
    """Every port that somebody listens on in a campaign, the single engine's first."""


def build(setup: Setup) -> Built:
    """The members, with ports of their own."""
    rng = random.Random(f"proxies {setup.seed}")
    # Ports are the machine's, not the seed's: two campaigns may run at once.
    # Each decode rank has one of the side channel's, its number added to the first.
    runs = stable_ports([*[1] * (4 + 2 * len(ENGINES)), *[setup.decode_tp] * len(ENGINES)], random.Random())
    _, router, internal, metaserver, *rest = (run[0] for run in runs)
    secret = {"PDCLUSTER_SECRET": secrets.token_hex(32)}
    members: list[Member] = []
    for number, kind in enumerate(ENGINES):
        port, outside, side_channel = rest[number :: len(ENGINES)]
        plan = _engine_plan(setup, kind, f"{kind.role.value}-{number}", port, side_channel)
        spec = engine_spec(dataclasses.replace(plan, env={**plan.env, **secret}))
        site, num_ranks = Site(kind.role.value), setup.tp_of(kind.role)
        members.append(Member(plan.name, site, spec, port, FaultProxy(outside, port, rng), num_ranks=num_ranks))
    spec = _router_spec(setup, members, (router, internal, metaserver), secret)
    members.append(Member("router", Site.ROUTER, spec, router, internal_port=internal))
    return Built(members, FaultProxy(metaserver, internal, rng), tuple(port for run in runs for port in run))


def _engine_plan(setup: Setup, kind: Kind, name: str, port: int, side_channel_port: int) -> EnginePlan:
    wire = WireSettings(name, setup.seed, ODDS, str(setup.storm_file), str(setup.trouble_log))
    is_prefill, num_ranks = kind.role is PoolRole.PREFILL, setup.tp_of(kind.role)
    module, _, connector_class = (setup.connector if is_prefill else CONNECTOR).partition(":")
    connector = {key: value for key, value in _CONNECTOR.items() if key in Settings.__struct_fields__}
    of_decode = {"side_channel_port": side_channel_port, "content_check": setup.content_check.value}
    return EnginePlan(
        name=name,
        role=kind.role,
        model=setup.model,
        port=port,
        log_path=setup.folder / f"{name}.log",
        parallelism=ParallelSizes(tensor=num_ranks),
        args=(*BASE_ARGS, *_SIZE, *_PROBE, "--kv-cache-memory-bytes", str(kind.cache_bytes // num_ranks), *kind.args),
        trace_file=setup.folder / f"{name}.trace",
        connector=connector if is_prefill else {**connector, **of_decode},
        load_failure_policy=kind.policy,
        kv_transfer={"kv_connector": connector_class, "kv_connector_module_path": module},
        env={**wire.as_env(), **PROBE_ENV},
    )


def _router_spec(
    setup: Setup, engines: list[Member], ports: tuple[int, int, int], secret: dict[str, str]
) -> EngineSpec:
    port, internal_port, metaserver_port = ports
    known = router_command._parser().format_help()
    flags = [word for flag, value in _ROUTER.items() if f"{flag} " in known for word in (flag, str(value))]
    argv = router_argv(
        prefill=[_outside(member) for member in engines if member.site is Site.PREFILL],
        decode=[_outside(member) for member in engines if member.site is Site.DECODE],
        port=port,
        internal_port=internal_port,
        trace_file=setup.folder / "router.trace",
        args=("--advertise-url", f"http://127.0.0.1:{metaserver_port}", *flags),
    )
    return EngineSpec("router", ROUTER_MODULE, argv, dict(secret), setup.folder / "router.log")


def _outside(member: Member) -> str:
    assert member.proxy is not None
    return f"http://127.0.0.1:{member.proxy.port}"
