"""What must hold in each state, and in a state in which nothing can happen any more.

I1  no source block is freed while a write can read it      (link against its engine)
I2  no destination block is given away, or granted to a newer attempt, while an older write can land (link, rank)
I3  received only what was written whole by that attempt    (``state.py``, at the moment of the report)
I4  one report per request and rank, of known requests only (``decode_side.py``, at that moment)
I5  where nothing can happen nobody waits, and such a state can be reached from every state (here and ``walk.py``)
I6  nothing in the forward thread waits: held by the types, since no core has anything that it could wait on
    (import-linter: "A core knows no library with I/O, no clock and no log"); not a matter of states.

A write that may land is looked at as if it would land next: so landings need no steps of their own.
"""

from __future__ import annotations

from model.decode_side import Rank, Vllm
from model.link import Link
from model.plan import Broken
from model.prefill_side import PrefillSide
from model.state import REQUESTS, State, Step, System, World, transfer_of


class Checks:
    """I1 and I2 of one state. Remembers what it has looked at."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._good: set[tuple[int, int]] = set()

    def check(self, state: State) -> None:
        """Raises:
        Broken: A promise does not hold.
        """
        layout = self._system.layout
        for index, (engine, p, d) in enumerate(layout.lanes):
            link = state[index]
            for place, look in ((layout.engines[engine], self._source), (layout.ranks[d], self._target)):
                pair = (link, state[place])
                if pair not in self._good:
                    look(self._system.store.parts[link], self._system.store.parts[state[place]], p)
                    self._good.add(pair)

    def _source(self, link: Link, engine: PrefillSide, rank: int) -> None:
        for lane in link.lanes.values():
            for key, flight in lane.flights.items():
                if flight.in_flight and (rank, key) in engine.freed:
                    raise Broken("I1", f"the source of {key} was freed while a write reads it")

    def _target(self, link: Link, rank: Rank, _: int) -> None:
        landing = set(link.kernel)
        for lane in link.lanes.values():
            landing |= {(lane.session, key) for key, flight in lane.flights.items() if flight.in_flight}
        for session, key in landing:
            if not rank.is_live(session):
                continue
            if key.transfer_id in rank.ended:
                raise Broken("I2", f"a write of {key} may land in blocks that decode rank {rank.number} gave back")
            if rank.granted.get(key.transfer_id, 0) > key.attempt:
                raise Broken("I2", f"a write of {key} may land in blocks that a newer attempt was granted")


def require_terminal(system: System, state: State) -> None:
    """Nothing can happen in ``state``: nobody may wait for anything.

    Raises:
        Broken: Somebody does.
    """
    step, layout = Step(system, state), system.layout
    world: World = step.part(layout.world)
    waits = (
        [f"a request was never let in, {world.num_admitted} were"] if world.num_admitted < system.plan.requests else []
    )
    waits += [f"decode still has {r}" for r, w in step.part(layout.decode).status.items() if w != Vllm.GONE]
    for index in layout.links:
        waits += [f"push {key}" for lane in step.part(index).lanes.values() for key in lane.flights]
    for place in layout.engines:
        waits += [f"source blocks of {held}" for held in step.part(place).is_held]
    for place in layout.ranks:
        waits += [f"receive of {transfer}" for transfer in step.part(place).reception._waiting]
    for place in layout.routers:
        side = step.part(place)
        if not side.is_dead and not side.pairing.is_over:
            waits.append(f"the router has {side.transfer} in {side.pairing.phase.name}")
    if system.plan.must_receive:
        every = {transfer_of(request) for request in REQUESTS[: world.num_admitted]}
        waits += [
            f"KV of {every - step.part(place).received}" for place in layout.ranks if every - step.part(place).received
        ]
    if waits:
        raise Broken("I5", f"nothing can happen, and these wait: {', '.join(waits)}")
