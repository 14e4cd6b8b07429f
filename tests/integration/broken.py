"""Connectors that are broken on purpose. The tests of ``test_broken.py`` show that each is found out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from fakes.transports import Failing, Forgetting, ForgettingOnce, Shortening, wrap_transports
from pdcluster_connector.steps import PrefillStep, PushSlice
from pdcluster_connector.transport.base import Transport
from pdcluster_connector.vllm.connector import PDClusterConnector
from pdcluster_connector.vllm.prefill_hooks import PrefillWorkerHooks
from pdcluster_connector.worker.prefill import PrefillWorker


class _BreaksTransports(PDClusterConnector):
    """Plans as it should, and writes by what ``wrap`` makes of its transports."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        wrap_transports(self._prefill_worker, self.wrap)

    @property
    def _prefill_worker(self) -> PrefillWorker:
        assert isinstance(self._worker_hooks, PrefillWorkerHooks)
        return self._worker_hooks._worker

    def wrap(self, inner: Transport) -> Transport:
        raise NotImplementedError


class SkipsALayer(_BreaksTransports):
    """Never sends the third layer, and counts its bytes as sent."""

    def wrap(self, inner: Transport) -> Transport:
        regions = self._prefill_worker._context.hello.layout.regions
        return Forgetting(inner, regions[2].base, regions[3].base)


class LosesAWriteOnce(_BreaksTransports):
    """Does not make its first write of the third layer, and counts its bytes as sent; later ones are made."""

    def wrap(self, inner: Transport) -> Transport:
        regions = self._prefill_worker._context.hello.layout.regions
        return ForgettingOnce(inner, regions[2].base, regions[3].base, 1)


class CutsARangeShort(_BreaksTransports):
    """Writes only the first half of every range, and counts all of it as sent."""

    def wrap(self, inner: Transport) -> Transport:
        return Shortening(inner)


class CallsFailuresDone(_BreaksTransports):
    """Says DONE for writes that the transport never made."""

    def wrap(self, inner: Transport) -> Transport:
        return Forgetting(inner, 0, 1 << 62)


class FailsEveryWrite(_BreaksTransports):
    """The transport fails, and the connector says so: the honest counterpart."""

    def wrap(self, inner: Transport) -> Transport:
        return Failing(inner)


class _BreaksPlans(PDClusterConnector):
    """Its workers push what ``change`` makes of each slice."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        step = connector_metadata.step
        assert isinstance(step, PrefillStep)
        changed = msgspec.structs.replace(step, slices=tuple(map(self.change, step.slices)))
        super().bind_connector_metadata(type(connector_metadata)(changed))

    def change(self, part: PushSlice) -> PushSlice:
        raise NotImplementedError


class SwapsTwoBlocks(_BreaksPlans):
    """Writes the first block of a prompt and its last, partly filled one into each other's place.

    Two full blocks would not do: keys carry their position, so attention does not mind their order.
    """

    def change(self, part: PushSlice) -> PushSlice:
        (group,) = part.groups
        blocks = group.source_blocks
        swapped = replace(group, source_blocks=(blocks[-1], *blocks[1:-1], blocks[0]))
        return msgspec.structs.replace(part, groups=(swapped,))


class OmitsABlock(_BreaksPlans):
    """Does not plan the last block of a prompt, so its byte count is honest and too small."""

    def change(self, part: PushSlice) -> PushSlice:
        (group,) = part.groups
        blocks = len(group.source_blocks)
        keep = blocks - part.is_last
        stop = group.start + -(-(group.stop - group.start) // blocks) * keep if blocks else group.stop
        return msgspec.structs.replace(part, groups=(replace(group, stop=stop),))


class NeverConnects(_BreaksPlans):
    """Its lanes knock at a door that is closed: a network that parts prefill from decode, but not from the router."""

    def change(self, part: PushSlice) -> PushSlice:
        closed = tuple(msgspec.structs.replace(address, port=9) for address in part.target.side_channels)
        return msgspec.structs.replace(part, target=msgspec.structs.replace(part.target, side_channels=closed))
