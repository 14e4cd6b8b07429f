"""The EndpointSlices that a list and a watch have shown so far, and the engines that they name.

    list --> all slices, at a resource version --watch from there--> ADDED, MODIFIED, DELETED: one slice each
                                                                     BOOKMARK: only a newer version
                                                                     ERROR: over; 410 means that the version is too old

Source of truth: Kubernetes' page "API concepts", "Efficient detection of changes"; its ``discovery.k8s.io/v1`` types
(``staging/src/k8s.io/api/discovery/v1/types.go``) and its page "EndpointSlices", section "Duplicate endpoints": an
endpoint that moves between slices may be in two of them, or in none, for a moment. Knows no connection and no clock.
A slice that cannot be used is named in the result and raises nothing. A failure changes nothing: the engines that were
known last stay known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import msgspec

from pdcluster_protocol import labels
from pdcluster_protocol.errors import NO_JSON, ProtocolError, Unavailable
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.membership import Member

PORT_NAME: Final = "http"
"""Name of the port on which an engine answers. By name, because slices may list others beside it."""

_ADDRESS_TYPES: Final = ("IPv4", "IPv6")
"""In the order in which they are preferred, for an instance that has both. FQDN is deprecated, and never used."""


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class Conditions(msgspec.Struct, frozen=True):
    """None is what the API calls unknown; ``Endpoint`` says how to read it."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Reference(msgspec.Struct, frozen=True):
    uid: str = ""
    name: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str]
    """All addresses of the endpoint; only the first one is used."""
    conditions: Conditions | None = None
    target_ref: Reference | None = None

    @property
    def is_ready(self) -> bool:
        """Unknown means ready."""
        ready = (self.conditions or Conditions()).ready
        return ready is None or ready

    @property
    def is_serving(self) -> bool:
        """Unknown means the same as ``is_ready``."""
        serving = (self.conditions or Conditions()).serving
        return self.is_ready if serving is None else serving

    @property
    def is_terminating(self) -> bool:
        """Unknown means not."""
        return bool((self.conditions or Conditions()).terminating)


class EndpointPort(msgspec.Struct, frozen=True, rename="camel"):
    name: str | None = None
    port: int | None = None
    app_protocol: str | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    metadata: Metadata
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


@dataclass(frozen=True, slots=True)
class Discovered:
    """The members that all slices name together."""

    members: tuple[Member, ...] = ()
    problems: frozenset[str] = field(default_factory=frozenset)
    """Slices that cannot be used, each with its name, what is wrong and the cure."""


def members_of(slices: Iterable[EndpointSlice], *, always_https: bool = False) -> Discovered:
    """Every engine once: first those with an IPv4 address, then those with IPv6 only, both in the order of URLs.
    ``slices``: all of one cluster. ``always_https``: every engine is asked over https, whatever its slice says."""
    sightings: list[_Sighting] = []
    problems: list[str] = []
    for one in slices:
        problem = _problem_of(one)
        if problem is None:
            sightings += _sightings_in(one, "https" if always_https else _scheme_of(one))
        elif one.endpoints:
            problems.append(f"EndpointSlice {one.metadata.name}: {problem}")
    return Discovered(tuple(_one_for_each_pod(_one_for_each_address(sightings))), frozenset(problems))


@dataclass(frozen=True, slots=True)
class _Sighting:
    """One endpoint in one slice."""

    member: Member
    version: int
    """The slice's version: of two sightings the one with the higher version is newer."""
    preference: int
    """Place of the slice's address type in ``_ADDRESS_TYPES``."""

    @property
    def rank(self) -> tuple[int, bool]:
        """The newer sighting wins; of two equally new ones, the one that is ready."""
        return self.version, self.member.is_ready


def _problem_of(one: EndpointSlice) -> str | None:
    role = (one.metadata.labels or {}).get(labels.ROLE)
    if role not in [known.value for known in Role]:
        return f"label {labels.ROLE} is {role!r}: give its Service prefill or decode"
    if one.address_type not in _ADDRESS_TYPES:
        return f"its addresses are {one.address_type or 'nothing'}: only {' and '.join(_ADDRESS_TYPES)} can be used"
    if _port_of(one) is None:
        return f"no port is named {PORT_NAME}: name the port of its Service so"
    return None


def _port_of(one: EndpointSlice) -> int | None:
    return next((port.port for port in one.ports or () if port.name == PORT_NAME), None)


def _scheme_of(one: EndpointSlice) -> str:
    """The scheme that the Service's port names in ``appProtocol``, which Kubernetes copies into the slice."""
    said = next((port.app_protocol for port in one.ports or () if port.name == PORT_NAME), None)
    return "https" if said == "https" else "http"


def _sightings_in(one: EndpointSlice, scheme: str) -> list[_Sighting]:
    preference = _ADDRESS_TYPES.index(one.address_type)
    version = _number(one.metadata.resource_version)
    endpoints = [endpoint for endpoint in one.endpoints or () if endpoint.addresses]
    return [_Sighting(_member_of(endpoint, one, scheme), version, preference) for endpoint in endpoints]


def _member_of(endpoint: Endpoint, one: EndpointSlice, scheme: str) -> Member:
    slice_labels: Mapping[str, str] = one.metadata.labels or {}
    target = endpoint.target_ref or Reference()
    address = endpoint.addresses[0]
    host = f"[{address}]" if one.address_type == "IPv6" else address
    return Member(
        url=f"{scheme}://{host}:{_port_of(one)}",
        role=Role(slice_labels[labels.ROLE]),
        revision=slice_labels.get(labels.REVISION, ""),
        uid=target.uid,
        pod=target.name,
        is_ready=endpoint.is_ready,
        is_serving=endpoint.is_serving,
        is_terminating=endpoint.is_terminating,
    )


def _one_for_each_address(sightings: Iterable[_Sighting]) -> list[_Sighting]:
    best: dict[str, _Sighting] = {}
    for sighting in sightings:
        other = best.get(sighting.member.url)
        best[sighting.member.url] = sighting if other is None else _merged(sighting, other)
    return list(best.values())


def _merged(a: _Sighting, b: _Sighting) -> _Sighting:
    newer, older = (a, b) if a.rank > b.rank else (b, a)
    if older.member.is_terminating is newer.member.is_terminating:
        return newer
    if newer.member.key == older.member.key:
        # A pod that terminates never comes back, whichever slice says it.
        return replace(newer, member=replace(newer.member, is_terminating=True))
    # An address is given away again when its pod has stopped, which may be long before that pod's object is gone (its
    # node is lost, say). Until then any change of the old pod's slice makes that slice the newer one.
    return older if newer.member.is_terminating else newer


def _one_for_each_pod(sightings: Iterable[_Sighting]) -> list[Member]:
    """A pod with addresses of two families is in slices of both, and still one engine. Of two addresses of one family,
    as after its sandbox was made anew, that of the newer slice counts."""
    best: dict[str, _Sighting] = {}
    for sighting in sorted(sightings, key=lambda it: (it.preference, -it.version, it.member.url)):
        best.setdefault(sighting.member.uid or sighting.member.url, sighting)
    return [it.member for it in sorted(best.values(), key=lambda it: (it.preference, it.member.url))]


def _number(resource_version: str) -> int:
    """Versions of one kind of object are numbers that grow (KEP-5504). Any other counts as the oldest."""
    return int(resource_version) if resource_version.isdecimal() else 0


class _List(msgspec.Struct, frozen=True):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class _WatchEvent(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _WatchError(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class SliceCache:
    """All slices of one cluster, as last told. One owner: the discovery's task."""

    def __init__(self, *, always_https: bool = False) -> None:
        """``always_https``: every engine is asked over https, whatever its slice says."""
        self._always_https = always_https
        self.resource_version = ""
        """Where a watch goes on; empty before the first list."""
        self._slices: dict[str, EndpointSlice] = {}

    @property
    def picture(self) -> Discovered:
        """The members that the slices name now. Costs a look at every endpoint."""
        return members_of(self._slices.values(), always_https=self._always_https)

    def replace(self, body: bytes) -> None:
        """The slices are now those of ``body``, the answer to a list.

        Raises:
            ProtocolError: It is no list of EndpointSlices. Nothing has changed.
        """
        try:
            listed = msgspec.json.decode(body, type=_List)
        except NO_JSON as error:
            raise ProtocolError(f"the answer is no list of EndpointSlices: {error}") from error
        self._slices = {one.metadata.name: one for one in listed.items or ()}
        self.resource_version = listed.metadata.resource_version

    def apply(self, line: bytes) -> bool:
        """Takes one event of a watch. Returns whether a slice has changed.

        Raises:
            Unavailable: The watch is over, as for a version that is too old: list again.
            ProtocolError: It is no event. Nothing has changed.
        """
        try:
            return self._apply(msgspec.json.decode(line, type=_WatchEvent))
        except NO_JSON as error:
            raise ProtocolError(f"this is no event of a watch: {error}") from error

    def _apply(self, event: _WatchEvent) -> bool:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_WatchError)
            raise Unavailable(f"the watch ended: {status.code} {status.message}")
        one = msgspec.json.decode(event.object, type=EndpointSlice)
        self.resource_version = one.metadata.resource_version
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        else:
            self._slices[one.metadata.name] = one
        return True
