"""Builds the connector's running parts from an engine's facts. Each part has one ``close``."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.gathering import may_have_strips
from pdcluster_connector.core.receiving import ReceiveTimes
from pdcluster_connector.core.reception import Reception
from pdcluster_connector.device import Device, select_device
from pdcluster_connector.ending import left_s
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.metaserver_client import CLOSE_S, MetaserverClient
from pdcluster_connector.metaserver_tls import MetaserverTls, TlsFiles
from pdcluster_connector.reshard import StagingMemory, StripStaging, bytes_from
from pdcluster_connector.scheduler.decode import DecodeEngine, DecodeScheduler
from pdcluster_connector.self_test.events import require_honest_events
from pdcluster_connector.self_test.machine import require_machine
from pdcluster_connector.settings import CUT_S, Settings
from pdcluster_connector.side_channel import DecodeChannel, Wakeup
from pdcluster_connector.trace import Trace
from pdcluster_connector.transport.base import Transport, TransportSettings
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.transport.shared import SharedSessions, Use
from pdcluster_connector.worker.content_loop import loop_for
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_connector.worker.inbound import InboundSessions
from pdcluster_connector.worker.lane_context import LaneContext
from pdcluster_connector.worker.prefill import PrefillWorker
from pdcluster_connector.worker.receiver import Receiver
from pdcluster_connector.worker.resharding import GroupResharding, Resharding, TokenMemory
from pdcluster_protocol.ids import BootId, RequestId
from pdcluster_protocol.launch import TransferProtocol
from pdcluster_protocol.metaserver import PrefillOutcome
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.side_channel import Hello, Welcome
from pdcluster_protocol.trace import PushTrace, ReceiveTrace


class DecodeHalf:
    """Decode's scheduler half and its metaserver client."""

    def __init__(
        self,
        facts: EngineFacts,
        side_channels: tuple[SideChannelAddress, ...],
        page_tokens: tuple[int, ...] = (),
    ) -> None:
        """``page_tokens``: tokens in a page of each KV group; empty: a block is one page.

        Raises:
            ConfigError: A file of TLS cannot be used.
        """
        outcomes: deque[tuple[RequestId, PrefillOutcome]] = deque()
        self._client = MetaserverClient(outcomes, facts.secret, _tls_of(facts.settings))
        engine = DecodeEngine(
            facts.engine_id,
            facts.tp_size,
            facts.groups,
            side_channels,
            facts.secret,
            num_stages=facts.num_stages,
            dp_rank=facts.dp_rank,
            page_tokens=page_tokens,
            transfer_protocol=facts.settings.transfer_protocol,
            content_check=facts.settings.content_check,
            min_push_tokens=facts.settings.min_push_tokens,
            can_fail_running=facts.can_fail_running,
        )
        self.requests = DecodeScheduler(engine, self._client, outcomes)

    def close(self, deadline: float) -> bool:
        """Cut every open call. Returns whether all are cut. Waits up to 2 s, but not beyond ``deadline`` (monotonic
        seconds)."""
        return self._client.close(min(CLOSE_S, left_s(deadline)))


def _tls_of(settings: Settings) -> MetaserverTls:
    """Raises: ConfigError: A file cannot be used."""
    ours = (settings.metaserver_cert, settings.metaserver_key)
    return MetaserverTls(TlsFiles(settings.metaserver_ca, *ours, settings.metaserver_tls_name))


@dataclass(frozen=True, slots=True)
class PrefillRank:
    """One prefill worker, and the sessions by which its lanes write."""

    worker: PrefillWorker
    sessions: Sessions

    def close(self, deadline: float) -> bool:
        """End the resharder, the lanes and their sessions. Returns whether none of them reads KV any more.

        Waits until ``deadline`` (monotonic seconds), of which the last 2 s are for the sessions alone.
        """
        are_over = self.worker.close(deadline - CUT_S)
        return self.sessions.close(deadline) and are_over


@dataclass(frozen=True, slots=True)
class DecodeRank:
    """One decode worker, and where it listens."""

    worker: Receiver
    address: SideChannelAddress

    def close(self, deadline: float) -> bool:
        """Stop answering and receiving. Returns whether no byte can land any more. Waits until ``deadline`` (monotonic
        seconds)."""
        return self.worker.close(deadline)


def new_boot_id() -> BootId:
    """A fresh boot id: for a decode rank, or for a prefill engine, whose scheduler half asks once."""
    return BootId(uuid.uuid4().hex)


def make_prefill_rank(
    facts: EngineFacts,
    memory: Memory,
    tokens: TokenMemory | None = None,
    *,
    device: Device | None = None,
    adapters: AdapterLoads | None = None,
    tell: Callable[[PushTrace | ReceiveTrace], None] | None = None,
) -> PrefillRank:
    """A prefill rank that can push. ``tokens``: its token-major KV, which may have to be resharded; None: it has none.
    ``adapters``: its LoRA adapters; None: its engine has none. ``tell``: as of ``Trace``.

    ``device``: as of benchmarks and tests, which watch the calls; None: the engine's own, by its type.

    Raises:
        ConfigError: The machine fails the self-test, the transport cannot start, the memory cannot be registered, or
            there is too little to stage KV in.
    """
    device, staging = _tested_device(facts, memory, device), None
    resharding = Resharding()
    if tokens is not None:
        staging = _make_staging(facts, tokens, device)
        resharding = GroupResharding(memory.layout, tokens, staging, device, facts.settings)
        memory = replace(memory, spans=(*memory.spans, staging.span))
    strips = _make_strips(facts, memory, device)
    if strips is not None:
        memory = replace(memory, spans=(*memory.spans, strips.memory.span))
    protocol = facts.settings.transfer_protocol
    use = Use.WRITES_AND_KNOWS_THE_END if protocol == TransferProtocol.RDMA else Use.WRITES
    sessions = _make_sessions(facts, memory, device, use)
    hello = Hello(facts.engine_id, BootId(""), memory.layout, memory.fingerprint, protocol)
    trace = Trace(facts.settings.trace_file, tell)
    reader = _make_reader(facts, memory)
    context = LaneContext(
        hello, sessions, device, facts.settings, facts.secret, trace, staging, reader, strips, adapters
    )
    return PrefillRank(PrefillWorker(context, resharding), sessions)


def make_decode_rank(
    facts: EngineFacts,
    memory: Memory,
    *,
    device: Device | None = None,
    adapters: AdapterLoads | None = None,
    tell: Callable[[PushTrace | ReceiveTrace], None] | None = None,
) -> DecodeRank:
    """A decode rank that listens. ``device``, ``adapters``, ``tell``: as of ``make_prefill_rank``.

    Raises:
        ConfigError: The machine fails the self-test, the side channel's port is taken, the transport cannot start, or
            the memory cannot be registered.
    """
    device = _tested_device(facts, memory, device)
    sessions, settings = _make_sessions(facts, memory, device, Use.LETS_IN), facts.settings
    wakeup, boot_id = Wakeup(), new_boot_id()
    num_ranks = facts.tp_size * facts.num_stages
    port = settings.side_channel_port and settings.side_channel_port + facts.dp_rank * num_ranks + memory.layout.rank
    channel = DecodeChannel(facts.host, port, boot_id, facts.secret, wakeup)
    welcome = Welcome(facts.engine_id, boot_id, "", memory.layout, settings.transfer_protocol)
    ask_s = settings.ask_s(has_adapters=adapters is not None)
    times = ReceiveTimes(settings.lease_s, settings.quarantine_s, ask_s)
    reception = Reception(welcome, memory.fingerprint, times, facts.secret)
    inbound = InboundSessions(sessions, wakeup.set)
    reader = _make_reader(facts, memory)
    trace = Trace(settings.trace_file, tell)
    worker = Receiver(channel, wakeup, reception, inbound, trace, device, reader, adapters)
    return DecodeRank(worker, SideChannelAddress(facts.host, channel.port, boot_id))


def _tested_device(facts: EngineFacts, memory: Memory, given: Device | None) -> Device:
    """The rank's device, after the self-test of machine and device. Raises: ConfigError: The self-test fails."""
    require_machine(facts.device_type, facts.settings.transfer_protocol)
    device = given or select_device(facts.device_type)
    if facts.device_type != "cpu":
        where = next((view.device for view in memory.views), torch.device(facts.device_type))
        require_honest_events(device, where)
    return device


def _make_reader(facts: EngineFacts, memory: Memory) -> KvReader | None:
    """A reader of the rank's KV, to compare content; None: no content can be compared."""
    if (reader := memory.reader) is None:
        return None
    return replace(reader, loop=loop_for(memory.views, facts.settings.content_check))


def _make_staging(facts: EngineFacts, tokens: TokenMemory, device: Device) -> StagingMemory:
    where = next(iter(tokens.data.values())).device
    return StagingMemory(facts.settings.staging_bytes, where, device.registration_alignment_bytes)


def _make_strips(facts: EngineFacts, memory: Memory, device: Device) -> StripStaging | None:
    """The staging memory of the rank's strips; None: the rank gathers no strips for any decode engine."""
    if not (facts.settings.gathers_strips and memory.views and may_have_strips(memory.layout)):
        return None
    alignment_bytes = device.registration_alignment_bytes
    memory.aligned_spans(alignment_bytes)  # Refuses KV memory that cannot be registered, before staging is allocated.
    staging = StagingMemory(facts.settings.strip_staging_bytes, memory.views[0].device, alignment_bytes)
    regions = enumerate(zip(memory.layout.regions, memory.views, strict=True))
    data = {at: bytes_from(view, it.base, it.span_bytes) for at, (it, view) in regions if it.has_tokens}
    return StripStaging(staging, data, device)


def _make_sessions(facts: EngineFacts, memory: Memory, device: Device, use: Use) -> Sessions:
    def start() -> Transport:
        device.enter_thread()  # Any thread may open a session.
        return _start_transport(facts, memory, device)

    return SharedSessions(start, use) if facts.settings.shares_session else Sessions(start)


def _start_transport(facts: EngineFacts, memory: Memory, device: Device) -> Transport:
    settings = facts.settings
    protocol, devices = settings.transfer_protocol, settings.transfer_devices
    wanted = TransportSettings(facts.host, protocol, devices, settings.writes_per_submit, device.enter_thread)
    return _registered(MooncakeTransport(wanted), memory, device)


def _registered(transport: Transport, memory: Memory, device: Device) -> Transport:
    """The transport with the memory. Raises: ConfigError: It takes no memory, and is closed."""
    with ExitStack() as unless_whole:  # Left alone it would listen, and keep memory pinned, until garbage is collected.
        unless_whole.callback(transport.close)
        for address, num_bytes in memory.aligned_spans(device.registration_alignment_bytes):
            transport.register(address, num_bytes)
        unless_whole.pop_all()
    return transport
