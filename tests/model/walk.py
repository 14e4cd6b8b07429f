"""The walk: breadth first over every state, so that the first trace to a broken promise is a shortest one."""

from __future__ import annotations

import itertools
import time
from array import array
from dataclasses import dataclass

import numpy as np

from model.checks import Checks, require_terminal
from model.moves import Label, moves
from model.plan import Broken, Plan
from model.state import State, Step, System


@dataclass(frozen=True)
class Figures:
    """What a walk has seen."""

    plan: Plan
    num_states: int
    num_transitions: int
    num_terminal: int
    depth: int
    num_parts: int
    num_acts: int
    seconds: float
    is_whole: bool

    def __str__(self) -> str:
        rest = "every state" if self.is_whole else "STOPPED at its limit, not every state"
        return (
            f"{self.plan}\n    {self.num_states:,} states, {self.num_transitions:,} transitions, "
            f"{self.num_terminal:,} ends, depth {self.depth}, {self.num_parts:,} different states of single parts, "
            f"{self.num_acts:,} calls of real code, {self.seconds:.0f} s: {rest}"
        )


class BrokenAt(Exception):
    """A promise does not hold at the end of ``trace``, which is a shortest one."""

    def __init__(self, broken: Broken, trace: list[Label]) -> None:
        steps = "\n".join(f"  {number:2}. {' '.join(map(_shown, label))}" for number, label in enumerate(trace, 1))
        super().__init__(f"{broken}\n{steps}")
        self.invariant = broken.invariant
        self.trace = trace


class Walk:
    """One plan's state space."""

    def __init__(self, plan: Plan, *, max_states: int = 50_000_000) -> None:
        self._plan = plan
        self._system = System(plan)
        self._checks = Checks(self._system)
        self._max_states = max_states
        self._number_of: dict[bytes, int] = {}
        self._states: list[bytes] = []
        self._came_from = array("I")
        self._edges_from = array("I")
        self._edges_to = array("I")
        self._terminal = array("I")

    def run(self) -> Figures:
        """Look at every state.

        Raises:
            BrokenAt: A promise does not hold in one of them.
        """
        begun = time.monotonic()
        self._add(self._system.initial(), 0)
        depth, level_end, number = 0, 1, 0
        while number < len(self._states) < self._max_states:
            if number == level_end:
                depth, level_end = depth + 1, len(self._states)
            self._expand(number)
            number += 1
        is_whole = number == len(self._states)
        if is_whole:
            self._require_ends_reachable()
        seconds = time.monotonic() - begun
        acts, parts = self._system.num_acts, len(self._system.store)
        return Figures(
            self._plan,
            len(self._states),
            len(self._edges_to),
            len(self._terminal),
            depth,
            parts,
            acts,
            seconds,
            is_whole,
        )

    def _expand(self, number: int) -> None:
        state = self._state(number)
        label: Label = ()
        try:
            found = moves(self._system, state)
            if all(label[0] == "fault" for label, _ in found):
                self._terminal.append(number)
                require_terminal(self._system, state)
            for label, do in found:
                step = Step(self._system, state)
                do(step)
                after = step.state
                self._edges_from.append(number)
                self._edges_to.append(self._add(after, number))
                label = label
        except Broken as broken:
            raise BrokenAt(broken, [*self._trace(number), label]) from broken

    def _add(self, state: State, came_from: int) -> int:
        packed = array("I", state).tobytes()
        number = self._number_of.get(packed)
        if number is None:
            self._checks.check(state)
            number = self._number_of[packed] = len(self._states)
            self._states.append(packed)
            self._came_from.append(came_from)
        return number

    def _state(self, number: int) -> State:
        packed = array("I")
        packed.frombytes(self._states[number])
        return tuple(packed)

    def _trace(self, number: int) -> list[Label]:
        path = [number]
        while path[-1]:
            path.append(self._came_from[path[-1]])
        path.reverse()
        return [self._label(before, after) for before, after in itertools.pairwise(path)]

    def _label(self, before: int, after: int) -> Label:
        state, wanted = self._state(before), self._state(after)
        for label, do in moves(self._system, state):
            step = Step(self._system, state)
            do(step)
            if step.state == wanted:
                return label
        raise AssertionError("a step of the trace cannot be made again")

    def _require_ends_reachable(self) -> None:
        """I5: from every state some end can be reached."""
        sources, targets = np.frombuffer(self._edges_from, np.uint32), np.frombuffer(self._edges_to, np.uint32)
        reaches = np.zeros(len(self._states), bool)
        reaches[np.frombuffer(self._terminal, np.uint32)] = True
        before = -1
        while before != (count := int(reaches.sum())):
            before = count
            reaches[sources[reaches[targets]]] = True
        if count < len(self._states):
            number = int(np.flatnonzero(~reaches)[0])
            broken = Broken("I5", f"{len(self._states) - count} states from which no end can be reached")
            raise BrokenAt(broken, self._trace(number))


def _shown(word: object) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
