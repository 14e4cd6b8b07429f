"""The context that all lanes of a prefill rank share: the rank's hello, and the tools of its lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.device import Device
from pdcluster_connector.reshard import StagingMemory, StripStaging
from pdcluster_connector.settings import Settings
from pdcluster_connector.trace import Trace
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.worker.content_sums import KvReader
from pdcluster_protocol.ids import BootId
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.side_channel import Hello


@dataclass(frozen=True, slots=True)
class LaneContext:
    """All lanes of one rank in one life of its engine have the same context. It never changes."""

    hello: Hello
    """The hello of each lane. Its boot id names the engine's life; empty until the first step has named it."""
    sessions: Sessions
    device: Device
    settings: Settings
    secret: Secret
    trace: Trace
    staging: StagingMemory | None = None
    """The staging memory that the rank's resharder fills; None without one."""
    reader: KvReader | None = None
    """Reads the rank's own KV; None: no content can be compared."""
    strips: StripStaging | None = None
    """The staging memory in which the lanes gather small strips; None: they gather none."""
    adapters: AdapterLoads | None = None
    """The rank's LoRA adapters; None: its engine has none."""

    def of_life(self, life: BootId) -> LaneContext:
        """The same context with ``life`` as the boot id of our engine."""
        return replace(self, hello=msgspec.structs.replace(self.hello, boot_id=life))
