"""Connectors that are broken on purpose. The tests of ``test_broken.py`` show that each is found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from pdcluster_connector.assembly import PrefillRank
from pdcluster_connector.steps import PrefillStep, PushSlice
from pdcluster_connector.transport.base import Transport, WriteId, WriteStatus
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_connector.vllm.connector import PDClusterConnector


class SkipsALayer(PDClusterConnector):
    """Never sends the third layer, and counts its bytes as sent."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        regions = prefill_rank(self).worker._parts.hello.layout.regions
        _wrap_sessions(self, lambda inner: _Forgetting(inner, regions[2].base, regions[3].base))


class SwapsTwoBlocks(PDClusterConnector):
    """Writes the first block of a prompt and its last, partly filled one into each other's place.

    Two full blocks would not do: keys carry their position, so attention does not mind their order.
    """

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        step = connector_metadata.step
        assert isinstance(step, PrefillStep)
        swapped = msgspec.structs.replace(step, slices=tuple(map(_swap, step.slices)))
        super().bind_connector_metadata(type(connector_metadata)(swapped))


class CutsARangeShort(PDClusterConnector):
    """Writes only the first half of every range, and counts all of it as sent."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        _wrap_sessions(self, _Shortening)


class OmitsABlock(PDClusterConnector):
    """Does not plan the last block of a prompt, so its byte count is honest and too small."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        step = connector_metadata.step
        shorter = msgspec.structs.replace(step, slices=tuple(map(_omit_last, step.slices)))
        super().bind_connector_metadata(type(connector_metadata)(shorter))


class CallsFailuresDone(PDClusterConnector):
    """Says DONE for writes that the transport never made."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        _wrap_sessions(self, lambda inner: _Forgetting(inner, 0, 1 << 62))


class FailsEveryWrite(PDClusterConnector):
    """The transport fails, and the connector says so: the honest counterpart."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        _wrap_sessions(self, _Failing)


class NeverConnects(PDClusterConnector):
    """Its lanes knock at a door that is closed: a network that parts prefill from decode, but not from the router."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        step = connector_metadata.step
        lost = msgspec.structs.replace(step, slices=tuple(map(_misdirect, step.slices)))
        super().bind_connector_metadata(type(connector_metadata)(lost))


class _Wrapped:
    """A transport that passes on what a subclass does not break."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def session(self) -> str:
        return self._inner.session

    @property
    def is_open(self) -> bool:
        return self._inner.is_open

    def register(self, address: int, num_bytes: int) -> None:
        self._inner.register(address, num_bytes)

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        return self._inner.submit_write(session, source, target, num_bytes)

    def write_status(self, write: WriteId) -> WriteStatus:
        return self._inner.write_status(write)

    def close(self) -> None:
        self._inner.close()


class _Forgetting(_Wrapped):
    """Writes from ``[begin, end)`` are DONE without having been made."""

    def __init__(self, inner: Transport, begin: int, end: int) -> None:
        super().__init__(inner)
        self._begin, self._end = begin, end

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        if self._begin <= source < self._end:
            return WriteId(-1)
        return super().submit_write(session, source, target, num_bytes)

    def write_status(self, write: WriteId) -> WriteStatus:
        return WriteStatus.DONE if write == -1 else super().write_status(write)


class _Shortening(_Wrapped):
    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        return super().submit_write(session, source, target, num_bytes // 2)


class _Failing(_Wrapped):
    def write_status(self, write: WriteId) -> WriteStatus:
        status = super().write_status(write)
        return WriteStatus.FAILED if status is WriteStatus.DONE else status


class Permuting(_Wrapped):
    """Writes pieces of ``piece_bytes`` into each other's place, and counts them as sent: a plan that is wrong.

    ``place_of``: where the piece of this number, counted from the memory's begin, is written instead.
    """

    def __init__(self, inner: Transport, begin: int, piece_bytes: int, place_of: Callable[[int], int]) -> None:
        super().__init__(inner)
        self._begin, self._piece_bytes, self._place_of = begin, piece_bytes, place_of
        self._parts: dict[WriteId, list[WriteId]] = {}

    def submit_write(self, session: str, source: int, target: int, num_bytes: int) -> WriteId:
        size, first = self._piece_bytes, target - self._begin
        assert first % size == num_bytes % size == 0
        parts = [
            self._inner.submit_write(
                session, source + done, self._begin + self._place_of((first + done) // size) * size, size
            )
            for done in range(0, num_bytes, size)
        ]
        self._parts[parts[-1]] = parts
        return parts[-1]

    def write_status(self, write: WriteId) -> WriteStatus:
        parts = self._parts[write]
        while parts:
            status = self._inner.write_status(parts[0])
            if status is not WriteStatus.DONE:
                return status
            parts.pop(0)
        return WriteStatus.DONE


def prefill_rank(connector: PDClusterConnector) -> PrefillRank:
    """The rank of a connector that is one."""
    assert connector._prefill_rank is not None
    return connector._prefill_rank


class WrappedSessions(Sessions):
    """Sessions whose transports are wrapped as they are opened."""

    def __init__(self, inner: Sessions, wrap: Callable[[Transport], Transport]) -> None:
        self._inner = inner
        self._wrap = wrap

    def open(self) -> Transport:
        return self._wrap(self._inner.open())

    def close(self) -> None:
        self._inner.close()


def _wrap_sessions(connector: PDClusterConnector, wrap: Callable[[Transport], Transport]) -> None:
    worker = prefill_rank(connector).worker
    worker._parts = replace(worker._parts, sessions=WrappedSessions(worker._parts.sessions, wrap))


def _swap(part: PushSlice) -> PushSlice:
    (group,) = part.groups
    blocks = group.source_blocks
    swapped = replace(group, source_blocks=(blocks[-1], *blocks[1:-1], blocks[0]))
    return msgspec.structs.replace(part, groups=(swapped,))


def _misdirect(part: PushSlice) -> PushSlice:
    closed = tuple(msgspec.structs.replace(address, port=9) for address in part.target.side_channels)
    return msgspec.structs.replace(part, target=msgspec.structs.replace(part.target, side_channels=closed))


def _omit_last(part: PushSlice) -> PushSlice:
    (group,) = part.groups
    blocks = len(group.source_blocks)
    keep = blocks - part.is_last
    stop = group.start + -(-(group.stop - group.start) // blocks) * keep if blocks else group.stop
    shorter = replace(group, stop=stop)
    return msgspec.structs.replace(part, groups=(shorter,))
