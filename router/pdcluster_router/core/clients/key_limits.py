"""How much each API key may ask of a router: requests at once, requests a minute, prompt tokens a minute.

    enter --within all of its limits--> one request more is running --leave--> it is not
      +-----over one of them----------> OverLimit: which, both numbers, and when asking again helps. Nothing is taken

A rate is a bucket. A full one holds what may be asked for in a minute, and an empty one fills in a minute: in any
stretch of t seconds no more goes through than ``limit * (1 + t / 60)``. A request larger than the bucket would never go
through, and its client is told so. The state of a bucket is one number: the time at which it is full.

If the queue has no place for a request, no engine gets it, and it gives back what it took of each rate:

    take --it has to wait--> hold --no place--> give_back     what has not flowed in again since, first in first out
                              +---it is over--> let_go

Keys of one name have one ``KeyUse``, and so has each client of tokens. Of these there may be any number: those that no
line of the file names are counted for a bounded number of them. Each router counts for itself. Knows no request and no
clock: ``now`` is monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf
from typing import Final

from pdcluster_router.core.apis.openai_errors import JWT_PREFIX

MAX_LIMIT: Final = 1_000_000_000
EVERY_TOKEN: Final = f"{JWT_PREFIX}*"
"""In metrics: all clients of tokens that no line of the file names."""
MAX_UNNAMED: Final = 10_000
"""Clients of tokens that are counted at a time. One that is forgotten, because as many others asked since, has the
limits of a new one."""
WINDOW_S: Final = 60.0
_RUNNING_RETRY_S: Final = 2
"""A guess: the router does not know when one of the key's requests will end."""
_ROUNDING_S: Final = 1e-6
"""Sums of seconds are not exact: a client that waited as long as it was told is let in."""


class LimitedBy(Enum):
    """The things that a key may have a limit of. The values are the words of the file, and the metric's label."""

    __hash__ = object.__hash__

    MAX_CONCURRENT = "max_concurrent"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    PROMPT_TOKENS_PER_MINUTE = "prompt_tokens_per_minute"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key, each in [1, ``MAX_LIMIT``]; None: no such limit."""

    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None


NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A request that is one too many for its key."""

    by: LimitedBy
    limit: int
    wanted: int
    """The number of requests or tokens that this request counts as."""
    left: int
    """The rest of ``limit`` that the key has."""
    retry_after_s: int | None
    """Whole seconds, at least 1, after which asking again may help; None: it never will."""


@dataclass(frozen=True, slots=True)
class RateLeft:
    """The amount of a rate that is left."""

    per_minute: int
    left: int
    full_in_s: float
    """Seconds after which all of ``per_minute`` is there again, if no more is taken."""


class _Take:
    """The part of a bucket that one request has taken. It flows in again in [``end - seconds``, ``end``)."""

    __slots__ = ("end", "seconds")

    def __init__(self, end: float, seconds: float) -> None:
        self.end = end
        self.seconds = seconds


class Bucket:
    """One rate. If ``per_minute`` is None, there is no limit."""

    __slots__ = ("_full_at", "_held", "per_minute")

    def __init__(self) -> None:
        self.per_minute: int | None = None
        self._full_at = -inf
        self._held: dict[Hashable, _Take] = {}
        """By request, in the order of taking: the takes that may be given back."""

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until ``amount`` may be taken, if no other request takes any; ``inf`` if it is more than a
        minute's."""
        if self.per_minute is None:
            return 0.0
        if amount > self.per_minute:
            return inf
        wait_s = self._missing_s(now) + amount * WINDOW_S / self.per_minute - WINDOW_S
        return wait_s if wait_s > _ROUNDING_S else 0.0

    def take(self, amount: int, now: float) -> None:
        """Takes ``amount``. Call it only if ``wait_s`` of ``amount`` is 0."""
        if self.per_minute is not None:
            self._full_at = now + self._missing_s(now) + amount * WINDOW_S / self.per_minute

    def hold(self, taker: Hashable, amount: int) -> None:
        """``taker``, which has just taken ``amount``, may give it back. Call it before any other ``take``."""
        if self.per_minute is not None:
            self._held[taker] = _Take(self._full_at, amount * WINDOW_S / self.per_minute)

    def give_back(self, taker: Hashable, now: float) -> None:
        """Puts back the part of ``taker``'s share that has not flowed in again. Costs a look at each later holder."""
        share = self._held.get(taker)
        if share is None:
            return
        back_s = min(share.seconds, max(0.0, share.end - now))
        for later in reversed(self._held.values()):
            if later is share:
                break
            later.end -= back_s
        self._full_at -= back_s
        del self._held[taker]

    def let_go(self, taker: Hashable) -> None:
        """``taker`` gives nothing back any more."""
        self._held.pop(taker, None)

    def left(self, now: float) -> int:
        """The amount that may be taken at once, in [0, ``per_minute``]. Only where there is a rate."""
        assert self.per_minute is not None, "no rate"
        each_s = WINDOW_S / self.per_minute
        rounding_s = min(_ROUNDING_S, each_s / 2)  # At a large rate more than one flows in within ``_ROUNDING_S``.
        return max(0, min(self.per_minute, int((WINDOW_S - self._missing_s(now) + rounding_s) / each_s)))

    def rate_left(self, now: float) -> RateLeft | None:
        """The amount that is left; None: there is no rate."""
        if self.per_minute is None:
            return None
        return RateLeft(self.per_minute, self.left(now), self._missing_s(now))

    def _missing_s(self, now: float) -> float:
        return max(0.0, self._full_at - now)


class KeyUse:
    """All that the keys of one name have asked for. One owner."""

    __slots__ = ("_max_concurrent", "_requests", "_tokens", "num_refused", "num_running", "total")

    def __init__(self) -> None:
        self.total: KeyUse | None = None
        """Counts the requests of several uses, of this one too; None: this one stands alone."""
        self.num_running = 0
        """Requests that have entered and not left."""
        self.num_refused = dict.fromkeys(LimitedBy, 0)
        """Refused requests, by the limit that each was told of."""
        self._max_concurrent: int | None = None
        self._requests = Bucket()
        self._tokens = Bucket()

    def limit(self, limits: KeyLimits) -> None:
        """``limits`` hold from now on. Running requests still count, and of each rate the same share is left as
        before."""
        self._max_concurrent = limits.max_concurrent
        self._requests.per_minute = limits.requests_per_minute
        self._tokens.per_minute = limits.prompt_tokens_per_minute

    def enter(self, num_tokens: int, *, now: float) -> OverLimit | None:
        """Lets in one request of ``num_tokens``, which runs until ``leave``. Returns why it is refused; None: it is
        not. A refusal takes nothing, and is counted."""
        wait_s, tokens_wait_s = self._requests.wait_s(1, now), self._tokens.wait_s(num_tokens, now)
        is_full = self._max_concurrent is not None and self.num_running >= self._max_concurrent
        if wait_s or tokens_wait_s or is_full:
            refusal = self._refusal(wait_s, tokens_wait_s, num_tokens, now)
            self.num_refused[refusal.by] += 1
            if self.total is not None:
                self.total.num_refused[refusal.by] += 1
            return refusal
        self._requests.take(1, now)
        self._tokens.take(num_tokens, now)
        self.num_running += 1
        if self.total is not None:
            self.total.num_running += 1
        return None

    def requests_left(self, now: float) -> RateLeft | None:
        """The rest of ``requests_per_minute``; None: the key has no such limit."""
        return self._requests.rate_left(now)

    def tokens_left(self, now: float) -> RateLeft | None:
        """The rest of ``prompt_tokens_per_minute``; None: the key has no such limit."""
        return self._tokens.rate_left(now)

    def hold(self, taker: Hashable, num_tokens: int) -> None:
        """``taker``, which has just entered with ``num_tokens``, may ``give_back`` until ``let_go``."""
        self._requests.hold(taker, 1)
        self._tokens.hold(taker, num_tokens)

    def give_back(self, taker: Hashable, now: float) -> None:
        """No engine gets this request: the rates get back what it took, except what has flowed in again already."""
        self._requests.give_back(taker, now)
        self._tokens.give_back(taker, now)

    def let_go(self, taker: Hashable) -> None:
        """``taker`` gives nothing back any more."""
        self._requests.let_go(taker)
        self._tokens.let_go(taker)

    def leave(self) -> None:
        """A request that entered is over. Call it once for each."""
        self.num_running -= 1
        assert self.num_running >= 0, "a request has left twice"
        if self.total is not None:
            self.total.num_running -= 1

    def _refusal(self, wait_s: float, tokens_wait_s: float, num_tokens: int, now: float) -> OverLimit:
        """Names the rate with the longer wait: the other one lets the request in by then, if no other request comes.
        Names ``max_concurrent`` where both rates have room."""
        if tokens_wait_s and tokens_wait_s >= wait_s:
            limit, left = self._tokens.per_minute, self._tokens.left(now)
            retry_s = None if tokens_wait_s == inf else ceil(tokens_wait_s)
            return OverLimit(LimitedBy.PROMPT_TOKENS_PER_MINUTE, limit or 0, num_tokens, left, retry_s)
        if wait_s:
            limit, left = self._requests.per_minute, self._requests.left(now)
            return OverLimit(LimitedBy.REQUESTS_PER_MINUTE, limit or 0, 1, left, ceil(wait_s))
        return OverLimit(LimitedBy.MAX_CONCURRENT, self._max_concurrent or 0, 1, 0, _RUNNING_RETRY_S)


class UnnamedUses:
    """The uses of clients of tokens that no line of the file names: all have the same limits. One owner."""

    def __init__(self, limits: KeyLimits, most: int = MAX_UNNAMED) -> None:
        """``most``: above it the client that asked the longest ago is forgotten, if no request of it runs."""
        self._limits = limits
        self._most = most
        self._uses: OrderedDict[str, KeyUse] = OrderedDict()
        self.sum = KeyUse()
        """The running and refused requests of all, refusals of those that are forgotten too. It goes on counting."""

    def __len__(self) -> int:
        return len(self._uses)

    def of(self, name: str) -> KeyUse:
        """The use of one client."""
        use = self._uses.get(name)
        if use is None:
            self._forget_one()
            use = self._uses[name] = KeyUse()
            use.total = self.sum
            use.limit(self._limits)
        self._uses.move_to_end(name)
        return use

    def take(self, name: str) -> KeyUse | None:
        """The use of a client that a line names from now on; None: it has none."""
        use = self._uses.pop(name, None)
        if use is not None:
            use.total = None
            self._count(use, -1)
        return use

    def adopt(self, name: str, use: KeyUse) -> None:
        """The use of a client that no line names any more. Its requests run on."""
        self._forget_one()
        self._uses[name] = use
        use.total = self.sum
        self._count(use, 1)
        use.limit(self._limits)

    def set_limits(self, limits: KeyLimits) -> None:
        self._limits = limits
        for use in self._uses.values():
            use.limit(limits)

    def _forget_one(self) -> None:
        """Makes room for a new client. Clients with a running request stay: there are no more of them than requests."""
        if len(self._uses) < self._most:
            return
        name = next((name for name, use in self._uses.items() if not use.num_running), None)
        if name is not None:
            self._uses.pop(name).total = None

    def _count(self, use: KeyUse, sign: int) -> None:
        """All that ``use`` has counted is added to the sum, or taken from it. ``sign``: 1 or -1."""
        self.sum.num_running += sign * use.num_running
        for by, number in use.num_refused.items():
            self.sum.num_refused[by] += sign * number


class KeyUses:
    """The use of each key and each client of tokens that has limits. One owner."""

    def __init__(self, limits: Mapping[str, KeyLimits], of_others: KeyLimits = NO_LIMITS) -> None:
        """``limits``: by the key's name. ``of_others``: of each client of tokens that is not in ``limits``."""
        self._uses: dict[str, KeyUse] = {}
        self._unnamed: UnnamedUses | None = None
        self.set_limits(limits, of_others)

    def of(self, name: str) -> KeyUse | None:
        """The use of one key or client; None: it has no limits."""
        use = self._uses.get(name)
        if use is None and self._unnamed is not None and name.startswith(JWT_PREFIX):
            return self._unnamed.of(name)
        return use

    def all(self) -> Iterable[tuple[str, KeyUse]]:
        """The uses for metrics. Those of clients that no line names are one, by the name ``EVERY_TOKEN``."""
        others = () if self._unnamed is None else ((EVERY_TOKEN, self._unnamed.sum),)
        return (*self._uses.items(), *others)

    def set_limits(self, limits: Mapping[str, KeyLimits], of_others: KeyLimits = NO_LIMITS) -> None:
        """``limits`` hold from now on. The use of a key that has lost its limits is kept if a request of it runs."""
        if of_others == NO_LIMITS:
            self._unnamed = None
        elif self._unnamed is None:
            self._unnamed = UnnamedUses(of_others)
        else:
            self._unnamed.set_limits(of_others)
        before, self._uses = self._uses, {}
        for name, use in before.items():
            if name not in limits and self._unnamed is not None and name.startswith(JWT_PREFIX):
                self._unnamed.adopt(name, use)
            elif name in limits or use.num_running:
                self._uses[name] = use
                use.limit(limits.get(name, NO_LIMITS))
        for name in limits.keys() - before.keys():
            use = self._uses[name] = self._use_of_new(name)
            use.limit(limits[name])

    def _use_of_new(self, name: str) -> KeyUse:
        """Of a name that has limits of its own from now on."""
        known = None if self._unnamed is None else self._unnamed.take(name)
        return known or KeyUse()
