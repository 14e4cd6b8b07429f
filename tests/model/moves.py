"""What may happen next in a state: steps of the parties, timers, and faults while their budget lasts.

Time is left out: a timer may pass as soon as it is set. In the course of things it passes only when nothing else
can happen, and deadlines last; that it passes before (a slow or stopped party, a long delay) is the fault ``early``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

from model.decode_side import Rank, Vllm, make_decode_side, make_rank
from model.link import Flight, Link
from model.plan import FAULT_NAMES
from model.prefill_side import ABORTING, ORDERED, RUNNING
from model.router_side import FAILED
from model.state import REQUESTS, State, Step, System, World, transfer_of
from pdcluster_connector.core.sending import PushKey, PushPhase
from pdcluster_protocol.ids import RequestId
from pdcluster_router.core.requests.pairing import Phase as PairingPhase

Label: TypeAlias = tuple[Any, ...]
Move: TypeAlias = tuple[Label, Callable[[Step], None]]

_FAULT: Final = {name: index for index, name in enumerate(FAULT_NAMES)}


def moves(system: System, state: State) -> list[Move]:
    """Everything that may happen in ``state``."""
    step = Step(system, state)
    world: World = step.part(system.layout.world)
    found = list(_steps(system, step, world))
    if found:
        if world.faults[_FAULT["early"]]:
            found += [_spent("early", move) for move in _timers(system, step)]
    else:
        timers = list(_timers(system, step))
        found = [move for move in timers if "deadline" not in move[0]]
        found = found if found or system.plan.is_prompt else timers
    for name, left in zip(FAULT_NAMES, world.faults, strict=True):
        if left and name in _FAULTS:
            found += [_spent(name, move) for move in _FAULTS[name](system, step, world)]
    return found


def _spent(name: str, move: Move) -> Move:
    label, do = move

    def do_and_count(step: Step) -> None:
        world = step._system.layout.world
        faults = list(step.part(world).faults)
        faults[_FAULT[name]] -= 1
        step.world(faults=tuple(faults))
        do(step)

    return ("fault", name, *label), do_and_count


# In the course of things.


def _steps(system: System, step: Step, world: World) -> Iterator[Move]:
    layout = system.layout
    for index in layout.links:
        for places, deliver in ((layout.to_decode, _deliver_to_decode), (layout.to_prefill, _deliver_to_prefill)):
            if step.part(places[index]):
                yield (deliver.__name__, index), partial(deliver, system, index, 0, 1)
        yield from _writes(system, step, index)
    for place in layout.ranks:
        yield from _rank_steps(step.part(place))
    for number, place in enumerate(layout.engines):
        for key, state in step.part(place).jobs.items():
            yield ("prefill", number, state, *key), _job(system, number, key, state)
    for call in world.calls:
        yield ("call", *call[:2]), partial(_deliver_call, system, call)
    yield from _decode_steps(system, step, world)


def _rank_steps(rank: Rank) -> Iterator[Move]:
    if rank.inbox:
        yield ("rank takes news", rank.number), _call(Step.rank, rank.number, "take")
    for key in sorted(rank.comparing):
        yield ("rank compares", rank.number, *key), _call(Step.rank, rank.number, "compare", *key)
    for session in rank.cutting:
        yield ("session closed", rank.number, session), _call(Step.rank, rank.number, "closed", session)


def _call(kind: Callable[..., None], number: int, name: str, *args: Any) -> Callable[[Step], None]:
    return lambda step: kind(step, number, name, *args)


def _job(system: System, number: int, key: PushKey, state: str) -> Callable[[Step], None]:
    if state == ORDERED:
        return _call(Step.engine, number, "begin", system.plan, key)
    name = {RUNNING: "complete", ABORTING: "aborted"}.get(state, "replied")
    return _call(Step.engine, number, name, key)


def _decode_steps(system: System, step: Step, world: World) -> Iterator[Move]:
    status = step.part(system.layout.decode).status
    for request, where in status.items():
        if where == Vllm.READY:
            yield ("decode answers", request), partial(_answer, request)
    is_free = system.plan.are_together or all(where == Vllm.GONE for where in status.values())
    if world.num_admitted < system.plan.requests and is_free:
        yield ("admit", REQUESTS[world.num_admitted]), partial(_admit, system, world.num_admitted)


def _answer(request: RequestId, step: Step) -> None:
    step.decode("answer", request)


def _admit(system: System, number: int, step: Step) -> None:
    step.world(num_admitted=number + 1)
    step.decode("admit", system.plan, REQUESTS[number], transfer_of(REQUESTS[number]))


def _writes(system: System, step: Step, index: int) -> Iterator[Move]:
    rank: Rank = step.part(system.layout.ranks[system.layout.lanes[index][2]])
    link: Link = step.part(index)
    for peer, lane in link.lanes.items():
        for key, flight in lane.flights.items():
            if flight.to_submit and flight.push.may_write:
                yield ("submit", index, *key), _call(Step.link, index, "submit", peer, key)
            if flight.in_flight > flight.num_failed:
                name = "acknowledged" if rank.is_live(lane.session) else "write_failed"
                yield (name, index, *key), _call(Step.link, index, name, system.plan, peer, key)


def _deliver_to_decode(system: System, index: int, at: int, count: int, step: Step) -> None:
    """``count`` 0: it stays, and comes again."""
    place = system.layout.to_decode[index]
    queue = step.part(place)
    step.put(place, queue[:at] + queue[at + count :])
    peer, message = queue[at]
    step.rank(system.layout.lanes[index][2], "hear", peer, message)


def _deliver_to_prefill(system: System, index: int, at: int, count: int, step: Step) -> None:
    place = system.layout.to_prefill[index]
    queue = step.part(place)
    step.put(place, queue[:at] + queue[at + count :])
    step.link(index, "hear", system.plan, *queue[at])


def _deliver_call(system: System, call: tuple[Any, ...], step: Step) -> None:
    layout, plan = system.layout, system.plan
    step.world(calls=tuple(other for other in step.part(layout.world).calls if other is not call))
    match call:
        case ("post", request, reservation):
            step.router(REQUESTS.index(request), "post", plan, reservation)
        case ("hangup", request):
            step.router(REQUESTS.index(request), "hangup", plan)
        case ("outcome", request, outcome):
            step.decode("outcome", request, outcome)
        case ("abort_decode", request):
            step.decode("abort", request)


# Timers.


def _timers(system: System, step: Step) -> Iterator[Move]:
    for number, place in enumerate(system.layout.ranks):
        for timer in step.part(place).timers():
            yield ("timer", number, *timer), _call(Step.rank, number, "fire", timer)
    for index in system.layout.links:
        for peer, lane in step.part(index).lanes.items():
            for key, flight in lane.flights.items():
                for timer in _timers_of(flight):
                    yield ("timer", index, timer, *key), _call(Step.link, index, "fire", system.plan, peer, key, timer)


def _timers_of(flight: Flight) -> Iterator[str]:
    push = flight.push
    if push.phase is PushPhase.STOPPING and flight.in_flight:
        yield "_hold_until"
    elif push.phase in (PushPhase.OPENING, PushPhase.WRITING, PushPhase.COMPARING):
        yield "deadline"


# Faults.


def _queues(system: System, step: Step) -> Iterator[tuple[int, range, Callable[..., None]]]:
    for index in system.layout.links:
        for places, deliver in (
            (system.layout.to_decode, _deliver_to_decode),
            (system.layout.to_prefill, _deliver_to_prefill),
        ):
            if step.part(places[index]):
                yield index, places, deliver


def _lose(system: System, step: Step, world: World) -> Iterator[Move]:
    for index, places, deliver in _queues(system, step):
        place = places[index]
        yield (deliver.__name__, index), partial(lambda place, step: step.put(place, step.part(place)[1:]), place)


def _repeat(system: System, step: Step, world: World) -> Iterator[Move]:
    for index, _, deliver in _queues(system, step):
        yield (deliver.__name__, index), partial(deliver, system, index, 0, 0)


def _reorder(system: System, step: Step, world: World) -> Iterator[Move]:
    for index, places, deliver in _queues(system, step):
        for at in range(1, len(step.part(places[index]))):
            yield (deliver.__name__, index, at), partial(deliver, system, index, at, 1)


def _break_write(system: System, step: Step, world: World) -> Iterator[Move]:
    for (name, *label), _ in [move for index in system.layout.links for move in _writes(system, step, index)]:
        if name == "acknowledged":
            index, key = label[0], PushKey(*label[1:])
            link: Link = step.part(index)
            peer = next(p for p, lane in link.lanes.items() if key in lane.flights)
            yield (index, *key), _call(Step.link, index, "write_failed", system.plan, peer, key)


def _crash_prefill(system: System, step: Step, world: World) -> Iterator[Move]:
    for number, place in enumerate(system.layout.engines):
        if step.part(place).jobs or step.part(place).is_held:
            yield (number,), partial(_kill_prefill, system, number)


def _kill_prefill(system: System, number: int, step: Step) -> None:
    step.engine(number, "crash", system.plan)
    for index in system.layout.links_of(number):
        step.link(index, "crash")
        step.put(system.layout.to_prefill[index], ())


def _crash_decode(system: System, step: Step, world: World) -> Iterator[Move]:
    if any(where != Vllm.GONE for where in step.part(system.layout.decode).status.values()):
        yield (), partial(_kill_decode, system)


def _kill_decode(system: System, step: Step) -> None:
    layout, plan = system.layout, system.plan
    world: World = step.part(layout.world)
    life = world.decode_life + 1
    step.world(decode_life=life, calls=())
    fresh = make_decode_side(plan, life)
    old = step.part(layout.decode).status
    fresh.status = dict.fromkeys(old, Vllm.GONE)
    step._numbers[layout.decode] = system.store.intern(fresh)
    for number, place in enumerate(layout.ranks):
        step._numbers[place] = system.store.intern(make_rank(plan, number, life))
    for place in layout.to_decode:
        step.put(place, ())
    for request in old:
        step.router(REQUESTS.index(request), "decode_died", plan)


def _crash_router(system: System, step: Step, world: World) -> Iterator[Move]:
    live = _live_routers(system, step)
    if live:
        yield (), partial(_kill_router, live)


def _kill_router(live: list[int], step: Step) -> None:
    for number in live:
        step.router(number, "crash")


def _live_routers(system: System, step: Step) -> list[int]:
    routers = [(number, step.part(place)) for number, place in enumerate(system.layout.routers)]
    admitted = step.part(system.layout.world).num_admitted
    return [n for n, side in routers if n < admitted and not side.is_dead and not side.pairing.is_over]


def _cut_call(system: System, step: Step, world: World) -> Iterator[Move]:
    for number in _live_routers(system, step):
        if step.part(system.layout.routers[number]).open:
            yield (REQUESTS[number],), partial(_break_call, system, number)


def _break_call(system: System, number: int, step: Step) -> None:
    step.router(number, "hangup", system.plan)
    step._add_call(("outcome", REQUESTS[number], FAILED))


def _prefill_fails(system: System, step: Step, world: World) -> Iterator[Move]:
    for number, place in enumerate(system.layout.engines):
        for key, state in step.part(place).jobs.items():
            if state in (ORDERED, RUNNING):
                yield (number, state, *key), _call(Step.engine, number, "fail", key)


def _prefill_late(system: System, step: Step, world: World) -> Iterator[Move]:
    for number in _live_routers(system, step):
        if step.part(system.layout.routers[number]).pairing.phase is PairingPhase.PREFILLING:
            yield (number,), _call(Step.router, number, "prefill_late", system.plan)


def _cancel(system: System, step: Step, world: World) -> Iterator[Move]:
    for number in _live_routers(system, step):
        yield (REQUESTS[number],), _call(Step.router, number, "client_gone", system.plan)


def _idle(system: System, step: Step, world: World) -> Iterator[Move]:
    for number, place in enumerate(system.layout.ranks):
        for session in set(step.part(place).open.values()):
            yield (session,), _call(Step.rank, number, "fire", ("idle", session))


def _spoil(system: System, step: Step, world: World) -> Iterator[Move]:
    for number, place in enumerate(system.layout.ranks if system.plan.compares else ()):
        for key in step.part(place).spoilable():
            yield (number, *key), _call(Step.rank, number, "spoil", *key)


_FAULTS: Final[dict[str, Callable[[System, Step, World], Iterator[Move]]]] = {
    "lose": _lose,
    "repeat": _repeat,
    "reorder": _reorder,
    "write": _break_write,
    "crash_prefill": _crash_prefill,
    "crash_decode": _crash_decode,
    "crash_router": _crash_router,
    "cut_call": _cut_call,
    "prefill_fails": _prefill_fails,
    "prefill_late": _prefill_late,
    "cancel": _cancel,
    "idle": _idle,
    "spoil": _spoil,
}
