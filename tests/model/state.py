"""One state of the whole system as a tuple of numbers, and the making of the next one.

Each part (a link, a rank, an engine, ...) is interned, so a state is a short tuple; what a part does on one event
is computed once by the real code and remembered. A step works on a list and thaws only the parts that it touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from model.decode_side import decode_boot, fingerprint, layout_of, make_decode_side, make_rank
from model.freeze import Store
from model.link import Link, Output
from model.plan import FAULT_NAMES, Broken, Plan
from model.prefill_side import make_prefill_side
from model.router_side import make_router_side
from pdcluster_connector.core.sending import PushKey
from pdcluster_protocol.ids import BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.side_channel import Hello

State: TypeAlias = tuple[int, ...]

REQUESTS: Final = (RequestId("A"), RequestId("B"))


def transfer_of(request: RequestId) -> TransferId:
    return TransferId(request.lower())


@dataclass(frozen=True)
class World:
    """What belongs to nobody: calls under way, faults left, requests that have come, decode's life."""

    calls: tuple[Output, ...] = ()
    faults: tuple[int, ...] = ()
    num_admitted: int = 0
    decode_life: int = 0


class Layout:
    """Which place of a state holds what."""

    def __init__(self, plan: Plan) -> None:
        self.lanes = [(engine, p, d) for engine in range(plan.engines) for p, d in plan.pairs]
        count = len(self.lanes)
        self.links = range(count)
        self.to_decode = range(count, 2 * count)
        self.to_prefill = range(2 * count, 3 * count)
        self.engines = range(3 * count, 3 * count + plan.engines)
        self.ranks = range(self.engines.stop, self.engines.stop + plan.decode_ranks)
        self.decode = self.ranks.stop
        self.routers = range(self.decode + 1, self.decode + 1 + plan.requests)
        self.world = self.routers.stop

    def links_of(self, engine: int) -> list[int]:
        return [index for index, lane in enumerate(self.lanes) if lane[0] == engine]

    def link_named(self, peer: bytes) -> int:
        engine, p, d = peer.split(b"-")[0].decode()[1:].split(".")
        return self.lanes.index((int(engine), int(p), int(d)))


class Step:
    """One transition: a copy of a state that is being changed. Outputs of one part become calls of others."""

    def __init__(self, system: System, state: State) -> None:
        self._system = system
        self._numbers = list(state)

    @property
    def state(self) -> State:
        return tuple(self._numbers)

    def part(self, place: int) -> Any:
        """What is at ``place`` now. Not to be changed."""
        return self._system.store.parts[self._numbers[place]]

    def put(self, place: int, value: Any) -> None:
        """Replace a part that is hashable as it is."""
        self._numbers[place] = self._system.store.intern_plain(value)

    def call(self, place: int, name: str, *args: Any) -> tuple[Output, ...]:
        """Let one part act; what it says is for the caller to pass on."""
        self._numbers[place], out = self._system.act(self._numbers[place], name, args)
        return out

    def world(self, **changes: Any) -> None:
        world: World = self.part(self._system.layout.world)
        self.put(self._system.layout.world, World(**{**vars(world), **changes}))

    # What each party says goes to others.

    def link(self, index: int, name: str, *args: Any) -> None:
        layout, plan = self._system.layout, self._system.plan
        engine, p, d = layout.lanes[index]
        for out in self.call(index, name, *args):
            match out:
                case ("send", peer, message):
                    self._to_decode(index, peer, message)
                case ("hello", peer):
                    boot = BootId(f"p{engine}-{peer.split(b'-')[1].decode()}")
                    theirs = layout_of(plan, p, plan.prefill_ranks)
                    hello = Hello(EngineId(f"p{engine}"), boot, theirs, self._system.fingerprint)
                    self._to_decode(index, peer, hello)
                case ("released", key):
                    self.engine(engine, "released", p, d, key)

    def _to_decode(self, index: int, peer: bytes, message: Any) -> None:
        layout = self._system.layout
        # A frame for another life of decode does not fit its seal there.
        if peer.endswith(b"@" + decode_boot(self.part(layout.world).decode_life).encode()):
            place = layout.to_decode[index]
            self.put(place, (*self.part(place), (peer, message)))

    def engine(self, number: int, name: str, *args: Any) -> None:
        layout, plan = self._system.layout, self._system.plan
        for out in self.call(layout.engines[number], name, *args):
            match out:
                case (("begin" | "complete" | "give_up") as what, *about):
                    for index in layout.links_of(number):
                        self.link(index, what, plan, *about)
                case ("forget", rank, key):
                    self._forget(number, rank, key)
                case ("prefilled", key, is_ok):
                    self.router(self._request_of(key), "prefilled", plan, key, is_ok)

    def _forget(self, engine: int, rank: int, key: PushKey) -> None:
        for index in self._system.layout.links_of(engine):
            if self._system.layout.lanes[index][1] == rank:
                self.link(index, "forget", key)

    def rank(self, number: int, name: str, *args: Any) -> None:
        layout = self._system.layout
        for out in self.call(layout.ranks[number], name, *args):
            match out:
                case ("reply", peer, message):
                    place = layout.to_prefill[layout.link_named(peer)]
                    self.put(place, (*self.part(place), (peer, message)))
                case ("ended", request, transfer, is_received, attempt):
                    if is_received:
                        self._require_landed(number, PushKey(transfer, attempt))
                    self.decode("ended", self._system.plan, number, request)
                case ("lost", request, attempt):
                    self.decode("lost", request, attempt)

    def _require_landed(self, rank: int, key: PushKey) -> None:
        """I3: every part of the block was written completely by the attempt that decode believes."""
        plan, layout = self._system.plan, self._system.layout
        for prefill_rank in {p for p, d in plan.pairs if d == rank}:
            here = [i for i, lane in enumerate(layout.lanes) if lane[1:] == (prefill_rank, rank)]
            num_landed = max(self.part(index).landed.get(key, 0) for index in here)
            if num_landed not in (plan.writes, 2 * plan.writes):  # once, or all of it once more
                raise Broken("I3", f"decode rank {rank} received {key} before prefill rank {prefill_rank} had written")

    def decode(self, name: str, *args: Any) -> None:
        layout = self._system.layout
        for out in self.call(layout.decode, name, *args):
            match out:
                case ("news", news):
                    for number in range(len(layout.ranks)):
                        self.rank(number, "announce", news)
                case ("post", request, reservation):
                    self._add_call(("post", request, reservation))
                case ("hangup", request):
                    calls = self.part(layout.world).calls
                    self.world(calls=tuple(call for call in calls if call[:2] != ("post", request)))
                    self._add_call(("hangup", request))
                case ("answered", request):
                    self.router(REQUESTS.index(request), "answered", self._system.plan)

    def router(self, number: int, name: str, *args: Any) -> None:
        layout, request = self._system.layout, REQUESTS[number]
        for out in self.call(layout.routers[number], name, *args):
            match out:
                case ("outcome", outcome):
                    self._add_call(("outcome", request, outcome))
                case ("order", engine, key, decode_boot_id):
                    self.engine(engine, "order", key, decode_boot_id)
                case ("abort", engine, key):
                    self.engine(engine, "abort", key)
                case ("abort_decode",):
                    self._add_call(("abort_decode", request))

    def _add_call(self, call: Output) -> None:
        calls = self.part(self._system.layout.world).calls
        if call not in calls:
            self.world(calls=tuple(sorted((*calls, call), key=repr)))

    def _request_of(self, key: PushKey) -> int:
        return [transfer_of(request) for request in REQUESTS].index(key.transfer_id)


class System:
    """The parts of one plan. Not thread-safe; grows with what it has seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.layout = Layout(plan)
        self.store = Store()
        self.fingerprint = fingerprint(plan)
        self._acts: dict[tuple[int, str, tuple[Any, ...]], tuple[int, tuple[Output, ...]]] = {}

    @property
    def num_acts(self) -> int:
        """How many different things parts of their own have done."""
        return len(self._acts)

    def act(self, number: int, name: str, args: tuple[Any, ...]) -> tuple[int, tuple[Output, ...]]:
        """What the part ``number`` becomes and says when its method ``name`` is called."""
        key = (number, name, args)
        known = self._acts.get(key)
        if known is None:
            part = self.store.copy(number)
            out = getattr(part, name)(*args)
            known = self._acts[key] = (self.store.intern(part), out)
        return known

    def initial(self) -> State:
        """Every lane has been welcomed; nobody has asked for anything."""
        step = Step(self, tuple(self._first_parts()))
        for index, (_, _, d) in enumerate(self.layout.lanes):
            step.link(index, "connect", decode_boot(0))
            ((peer, hello),) = step.part(self.layout.to_decode[index])
            step.put(self.layout.to_decode[index], ())
            step.rank(d, "hear", peer, hello)
            ((peer, welcome),) = step.part(self.layout.to_prefill[index])
            step.put(self.layout.to_prefill[index], ())
            step.link(index, "hear", self.plan, peer, welcome)
        return step.state

    def _first_parts(self) -> Iterator[int]:
        plan, layout, store = self.plan, self.layout, self.store
        for engine, p, d in layout.lanes:
            yield store.intern(Link(f"p{engine}.{p}.{d}"))
        yield from [store.intern_plain(())] * (2 * len(layout.lanes))
        yield from (store.intern(make_prefill_side(plan, number)) for number in range(plan.engines))
        yield from (store.intern(make_rank(plan, number, 0)) for number in range(plan.decode_ranks))
        yield store.intern(make_decode_side(plan, 0))
        yield from (store.intern(make_router_side(plan, transfer_of(REQUESTS[n]))) for n in range(plan.requests))
        yield store.intern_plain(World(faults=tuple(getattr(plan.faults, name) for name in FAULT_NAMES)))
