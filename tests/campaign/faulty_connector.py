"""The connector of a campaign's engines: ours, with trouble on its wires. Loaded by ``kv_connector_module_path``."""

from __future__ import annotations

from campaign.wire import Dice, settings_from_env, trouble_channel, trouble_writes
from pdcluster_connector.side_channel import DecodeChannel, PrefillChannel
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_connector.vllm.connector import PDClusterConnector


class FaultyConnector(PDClusterConnector):
    """Exactly the product outside of a storm."""


def _prepare_this_process() -> None:
    """Once for each engine process, when vLLM loads this module: before any channel or transport exists."""
    settings = settings_from_env()
    if settings is None:
        return
    dice = Dice(settings)
    for kind in (PrefillChannel, DecodeChannel):
        trouble_channel(kind, dice)
    trouble_writes(MooncakeTransport, dice)


_prepare_this_process()
