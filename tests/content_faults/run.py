"""One fault after the other through the real cores: ``Receive`` decides, ``plan_again`` plans the second push.

A fault is done once, and must be healed by the second push byte by byte; or it is done again to what the second push
brought, and then the attempt must be lost, with one error, and nothing received.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import numpy as np
import torch

from content_faults.faults import FAULTS, Fault
from content_faults.scene import BOOT, Rank, Scene
from pdcluster_connector.core.content import Found, find_mismatch
from pdcluster_connector.core.receiving import (
    AttemptLost,
    Mismatched,
    Receive,
    ReceiveTimes,
    ReceivingCommands,
    Reply,
    Report,
)
from pdcluster_connector.core.writers import PeerId, Sender, SessionId
from pdcluster_connector.worker.second_push import plan_again
from pdcluster_protocol.ids import Attempt, TransferId
from pdcluster_protocol.params import ContentCheck
from pdcluster_protocol.side_channel import Again, Done

SIZES: Final = (1, 2, 4)
PAIRS: Final = tuple(product(SIZES, SIZES))
SAMPLED_KEYS: Final = 64
TIMES: Final = ReceiveTimes(1.0, 1.0, 1.0)
T, FIRST = TransferId("t"), Attempt(1)


@dataclass
class Tally:
    """What became of the faults of each kind, over all pairs."""

    done: Counter[str] = field(default_factory=Counter)
    healed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    sampled: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What must not be: faults that were not found, not healed, or received."""

    def add(self, other: Tally) -> None:
        for name in ("done", "healed", "lost", "sampled"):
            getattr(self, name).update(getattr(other, name))
        self.wrong += other.wrong


def run_pair(prefill_tp: int, decode_tp: int, num_faults: int, seed: int) -> Tally:
    """``num_faults`` faults, kind by kind in turn, on ranks of decode in turn."""
    torch.set_num_threads(1)
    dice, scene, tally = (
        np.random.default_rng([seed, prefill_tp, decode_tp]),
        Scene(prefill_tp, decode_tp, seed),
        Tally(),
    )
    clean = [rank.memory.clone() for rank in scene.decode]
    for number in range(num_faults):
        name = list(FAULTS)[number % len(FAULTS)]
        decode = number // len(FAULTS) % decode_tp
        _Case(scene, decode, clean[decode], tally, name, f"TP {prefill_tp} to {decode_tp}, fault {number}").run(dice)
    return tally


@dataclass
class _Case:
    scene: Scene
    decode: int
    clean: torch.Tensor
    tally: Tally
    name: str
    which: str

    @property
    def rank(self) -> Rank:
        return self.scene.decode[self.decode]

    def run(self, dice: np.random.Generator) -> None:
        seed, is_lasting = int(dice.integers(1 << 62)), dice.integers(4) == 0
        fault = FAULTS[self.name]
        self._spoil(fault, seed)
        self.tally.done[self.name] += 1
        self.tally.sampled[self.name] += self._is_seen_by_samples(f"t{dice.integers(SAMPLED_KEYS)}")
        receive = self._receive()
        commands = self._compare(receive)
        again = [c.message for c in commands if isinstance(c, Reply) and isinstance(c.message, Again)]
        if len(again) != len(self.scene.prefill) or not any(isinstance(c, Mismatched) for c in commands):
            self.tally.wrong.append(f"{self.which}, {self.name}: not found")
        else:
            self._second(receive, again[0], fault, seed, is_lasting=is_lasting)
        self.rank.memory.copy_(self.clean)

    def _second(self, receive: Receive, again: Again, fault: Fault, seed: int, *, is_lasting: bool) -> None:
        self._push_again(again)
        if is_lasting:
            self._spoil(fault, seed)
        for rank in range(len(self.scene.prefill)):
            self._done(receive, rank, 2)
        commands = self._compare(receive)
        received = [c for c in commands if isinstance(c, Report)]
        lost = [c for c in commands if isinstance(c, AttemptLost)]
        if is_lasting and not received and len(lost) == 1:
            self.tally.lost[self.name] += 1
        elif not is_lasting and received and not lost and torch.equal(self.rank.memory, self.clean):
            self.tally.healed[self.name] += 1
        else:
            self.tally.wrong.append(f"{self.which}, {self.name}, lasting {is_lasting}: {commands}")

    def _spoil(self, fault: Fault, seed: int) -> None:
        """Until something is another: bytes that were drawn may be those that are there."""
        dice = np.random.default_rng(seed)
        fault(self.rank, dice)
        while torch.equal(self.rank.memory, self.clean):
            fault(self.rank, dice)

    def _receive(self) -> Receive:
        receive = Receive(T, TIMES, deadline=1e9, wants_sums=True)
        for rank in range(len(self.scene.prefill)):
            sender = Sender(BOOT, rank, SessionId("s"), self.scene.debt())
            receive.open(PeerId(b"%d" % rank), FIRST, sender, now=0.0)
        for rank in range(len(self.scene.prefill)):
            self._done(receive, rank, 1)
        return receive

    def _done(self, receive: Receive, rank: int, num_pushes: int) -> None:
        sums = self.scene.pushed(ContentCheck.FULL, T, self.decode)[rank]
        receive.done(PeerId(b"%d" % rank), Done(T, FIRST, 1, 1, sums, num_pushes), now=0.0)

    def _compare(self, receive: Receive) -> ReceivingCommands:
        under_way = self.rank.reader.received(self.rank.order(ContentCheck.FULL), T)
        return receive.summed_up(FIRST, Found(under_way.plan, under_way.result()), now=0.0)

    def _is_seen_by_samples(self, key: str) -> bool:
        under_way = self.rank.reader.received(self.rank.order(ContentCheck.SAMPLED), key)
        pushed = self.scene.pushed(ContentCheck.SAMPLED, key, self.decode)
        return find_mismatch(Found(under_way.plan, under_way.result()), pushed) is not None

    def _push_again(self, again: Again) -> None:
        for (route, live), prefill in zip(self.scene.routes(self.decode), self.scene.prefill, strict=True):
            source, target = prefill.memory.data_ptr(), self.rank.memory.data_ptr()
            for part in plan_again(route, live, again, now=0.0):
                ranges = part.ranges
                for begin, end, size in zip(ranges.source, ranges.target, ranges.num_bytes, strict=True):
                    ctypes.memmove(
                        target + part.target_base + int(end), source + part.source_base + int(begin), int(size)
                    )
