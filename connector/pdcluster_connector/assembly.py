"""Builds the connector's running parts from an engine's facts; each has one ``close``."""

from __future__ import annotations

import uuid
from collections import deque
from dataclasses import dataclass

from pdcluster_connector.core.reception import Reception
from pdcluster_connector.engine_facts import EngineFacts, Memory
from pdcluster_connector.metaserver_client import MetaserverClient
from pdcluster_connector.scheduler.decode import DecodeEngine, DecodeScheduler
from pdcluster_connector.side_channel import DecodeChannel, Wakeup
from pdcluster_connector.trace import Trace
from pdcluster_connector.transport import make_transport
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.worker.decode import DecodeWorker
from pdcluster_connector.worker.device import select_device
from pdcluster_connector.worker.lane import LaneParts
from pdcluster_connector.worker.prefill import PrefillWorker
from pdcluster_connector.worker.receiver import Receiver
from pdcluster_protocol.ids import BootId, RequestId
from pdcluster_protocol.metaserver import Outcome
from pdcluster_protocol.params import SideChannelAddress
from pdcluster_protocol.side_channel import Hello, Welcome


class SchedulerDecode:
    """Decode's scheduler half and its metaserver client."""

    def __init__(self, facts: EngineFacts, side_channels: tuple[SideChannelAddress, ...]) -> None:
        outcomes: deque[tuple[RequestId, Outcome]] = deque()
        self._client = MetaserverClient(outcomes)
        engine = DecodeEngine(facts.engine_id, facts.tp_size, facts.block_size, side_channels)
        self.requests = DecodeScheduler(engine, self._client, outcomes)

    def close(self) -> None:
        """Cut every open call. Waits up to 2 s."""
        self._client.close()


@dataclass(frozen=True, slots=True)
class PrefillRank:
    """One prefill worker and its transport."""

    worker: PrefillWorker
    transport: Transport

    def close(self) -> None:
        """End the lanes, then the transport that they use."""
        self.worker.close()
        self.transport.close()


@dataclass(frozen=True, slots=True)
class DecodeRank:
    """One decode worker, its transport, and where it listens."""

    worker: DecodeWorker
    transport: Transport
    address: SideChannelAddress

    def close(self) -> None:
        """Stop answering, then stop receiving."""
        self.worker.close()
        self.transport.close()


def make_prefill_rank(facts: EngineFacts, memory: Memory, rank: int) -> PrefillRank:
    """A prefill rank that can push.

    Raises:
        ConfigError: The transport cannot start or the memory cannot be registered.
    """
    transport = _start_transport(facts, memory)
    # The same for all ranks: decode grants an attempt to the ranks of one engine life.
    boot_id = BootId(f"{facts.engine_id}:{facts.instance_id}")
    hello = Hello(facts.engine_id, boot_id, rank, facts.tp_size, memory.fingerprint)
    device = select_device(facts.device_type)
    parts = LaneParts(hello, memory.regions, transport, device, facts.settings, Trace(facts.settings.trace_file))
    return PrefillRank(PrefillWorker(parts), transport)


def make_decode_rank(facts: EngineFacts, memory: Memory, rank: int) -> DecodeRank:
    """A decode rank that listens.

    Raises:
        ConfigError: The side channel's port is taken, the transport cannot start, or the memory cannot be registered.
    """
    transport, settings = _start_transport(facts, memory), facts.settings
    wakeup = Wakeup()
    port = settings.side_channel_port and settings.side_channel_port + rank
    channel = DecodeChannel(facts.host, port, wakeup)
    boot_id = _new_boot_id()
    welcome = Welcome(facts.engine_id, boot_id, rank, facts.tp_size, transport.session, memory.regions)
    reception = Reception(welcome, memory.fingerprint, settings.quarantine_s)
    receiver = Receiver(channel, wakeup, reception, Trace(settings.trace_file))
    return DecodeRank(DecodeWorker(receiver), transport, SideChannelAddress(facts.host, channel.port, boot_id))


def _start_transport(facts: EngineFacts, memory: Memory) -> Transport:
    transport = make_transport(facts.settings.transport, host=facts.host, protocol=facts.settings.transfer_protocol)
    for address, num_bytes in memory.spans:
        transport.register(address, num_bytes)
    return transport


def _new_boot_id() -> BootId:
    return BootId(uuid.uuid4().hex)
