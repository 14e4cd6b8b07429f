"""The law of other settings: a router that is told them holds the same values as one that was started with them.

Compared are the plain values that can be reached from a router by attributes, lists and mappings with plain keys: a
copy of a setting that somebody keeps is among them. What closures and bound methods hold is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

import pytest

from fakes.reservations import SECRET
from pdcluster_protocol.launch import ForwardedHeader, RouterPolicy
from pdcluster_protocol.metaserver import Action
from pdcluster_router.front.router import Router
from pdcluster_router.front.setting_changes import TAKEN
from pdcluster_router.settings.forms import UnknownModels
from pdcluster_router.settings.router_settings import Settings, build_settings

pytestmark = pytest.mark.anyio

BASE: Final[dict[str, Any]] = {
    "prefill_urls": ("http://p:1",),
    "decode_urls": ("http://d:1",),
    "otlp_endpoint": "http://127.0.0.1:1",
    "trusted_proxies": ("10.0.0.0/8",),
}
OTHERS: Final[dict[str, Any]] = {
    "prefill_urls": ("http://p:1", "http://p:2"),
    "decode_urls": ("http://d:1", "http://d:2"),
    "policy": RouterPolicy.AFFINITY,
    "unknown_models": UnknownModels.ASK,
    "model_aliases": ("nick=m",),
    "trusted_proxies": ("10.0.0.0/9", "192.168.0.0/16"),
    "forwarded_header": ForwardedHeader.FORWARDED,
    "on_prefill_failure": Action.FAIL,
    "request_timeout_s": 77.0,
    "reservation_timeout_s": 7.0,
    "trace_sample_ratio": 0.25,
}
"""Another value of each setting that is no number with a default; for the others, one more."""
LOOKED_UP: Final = frozenset(
    ("max_body_bytes", "max_decode_attempts", "drain_timeout_s", "probe_interval_s", "probe_timeout_s")
)
"""No object keeps a copy of these: they are read from the settings when they are needed."""
HISTORY: Final = ("num_sorts", "aliases_since_unix_s", "slow_start", "is_room_told", "loop")
"""Parts of names of what tells how a router came to be as it is, and not how it is."""
PLAIN: Final = (int, float, str, bytes, Enum, IPv4Network, Path, type(None))


def other(name: str) -> Any:
    default = Settings.model_fields[name].default
    return OTHERS[name] if name in OTHERS else default + 1


def values_of(thing: object, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Each plain value below ``thing``, by its path."""
    if isinstance(thing, PLAIN):
        yield path, repr(thing)
    elif id(thing) not in seen:
        seen.add(id(thing))
        for name, part in parts_of(thing):
            yield from values_of(part, f"{path}.{name}", seen)


def parts_of(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, Mapping):
        yield from ((str(key), part) for key, part in thing.items() if isinstance(key, PLAIN))
    elif isinstance(thing, tuple | list):
        yield from ((str(index), part) for index, part in enumerate(thing))
    elif isinstance(thing, partial):
        yield from (("args", thing.args), ("keywords", thing.keywords), ("func", thing.func))
    elif callable(thing) and hasattr(thing, "__name__"):
        yield "name", f"{thing.__module__}.{thing.__name__}"
    elif type(thing).__module__.startswith("pdcluster_"):
        names = [*getattr(thing, "__dict__", ()), *(slot for kind in type(thing).__mro__ for slot in slots_of(kind))]
        yield from ((name, getattr(thing, name)) for name in names if hasattr(thing, name))


def slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


async def held_by(first: Settings, then: Settings | None = None) -> dict[str, str]:
    """The plain values of a router that was started with ``first``, and then told ``then``."""
    router = Router(first, SECRET)
    if then is not None:
        router.apply_settings(then)
    found = dict(values_of(router, "router", set()))
    await router.close()
    return {path: value for path, value in found.items() if not any(word in path for word in HISTORY)}


@pytest.mark.parametrize("name", sorted(TAKEN))
async def test_a_router_that_is_told_holds_what_one_that_was_started_so_holds(name: str) -> None:
    first = build_settings(**BASE)
    then = first.model_copy(update={name: other(name)})
    told, started, again = await held_by(first, then), await held_by(then), await held_by(then)
    noise = {path for path in started.keys() | again.keys() if started.get(path) != again.get(path)}
    assert {
        path: (told.get(path), started.get(path))
        for path in told.keys() | started.keys()
        if path not in noise and told.get(path) != started.get(path)
    } == {}
    before = await held_by(first)
    own = {path for path in told if ".settings." in path}
    kept = {path for path, value in told.items() if path not in noise | own and before.get(path) != value}
    assert kept or name in LOOKED_UP, "it has changed nothing"


async def test_a_copy_that_somebody_keeps_is_found() -> None:
    """What this file is for: the room that calls may take is worked out once, so its setting is not taken."""
    first = build_settings(**BASE)
    then = first.model_copy(update={"max_buffered_bytes": 1 << 20})
    told, started = await held_by(first, then), await held_by(then)
    assert any("callers" in path and told[path] != started.get(path) for path in told)
