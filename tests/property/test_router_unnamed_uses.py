"""The running sum of all clients that no line names is what their counts add up to, whatever they do."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from drawn import drawn
from pdcluster_router.core.clients.key_limits import KeyLimits, KeyUse, LimitedBy, UnnamedUses

STEPS = ("enter", "leave", "take", "adopt", "limit")
MOST = 3


class Slow:
    """Adds all counts up at each question. ``gone``: the refusals of the clients that were forgotten."""

    def __init__(self) -> None:
        self.uses = UnnamedUses(KeyLimits(max_concurrent=1), most=MOST)
        self.known: dict[str, KeyUse] = {}
        self.named: dict[str, KeyUse] = {}
        self.gone: Counter[LimitedBy] = Counter()

    def forget(self) -> None:
        for name in [name for name in self.known if name not in self.uses._uses]:
            self.gone += Counter(self.known.pop(name).num_refused)

    def of(self, name: str) -> KeyUse:
        use = self.known[name] = self.uses.of(name)
        self.forget()
        return use

    def step(self, do: str, name: str) -> None:
        if do == "enter":
            self.of(name).enter(1, now=0.0)
        elif do == "limit":
            self.uses.set_limits(KeyLimits(max_concurrent=2))
        elif do == "leave":
            use = self.known.get(name) or self.named.get(name)
            if use is not None and use.num_running:
                use.leave()
        elif do == "take" and (taken := self.uses.take(name)) is not None:
            self.named[name] = self.known.pop(name, taken)
        elif do == "adopt" and name in self.named and name not in self.known:
            self.known[name] = self.named.pop(name)
            self.uses.adopt(name, self.known[name])
            self.forget()

    def added_up(self) -> tuple[int, Counter[LimitedBy]]:
        refused = Counter(self.gone)
        for use in self.known.values():
            refused.update(use.num_refused)
        return sum(use.num_running for use in self.known.values()), +refused


@settings(max_examples=drawn(300), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abcdef")), max_size=60))
def test_the_sum_is_what_all_counts_add_up_to(steps: list[tuple[str, str]]) -> None:
    slow = Slow()
    for do, name in steps:
        slow.step(do, name)
        total = slow.uses.sum
        assert (total.num_running, +Counter(total.num_refused)) == slow.added_up()
