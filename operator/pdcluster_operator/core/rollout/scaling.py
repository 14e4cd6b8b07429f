"""Decides how many instances of each role are wanted, from the wishes of both roles' autoscalers.

Wishes come from two scalers that know nothing of each other. Bounds are the ratio prefill : decode and each role's own
maximum; a pool that runs has at least one instance of each role. The role that has too few is raised. If its maximum
forbids that, the other role is lowered. The result meets all bounds. A wish that meets all bounds is not changed.

    wish 1P8D, ratio 1:4 to 1:1               → 2P8D   (too few prefill)
    wish 1P8D, the same, at most 1 prefill    → 1P4D   (it cannot be raised)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Final

UNBOUNDED: Final = 10_000
"""More instances than any cluster has. A finite number, so that the search for a fitting pair ends."""


def exact_ratio(ratio: float) -> Fraction:
    """The ratio as a user wrote it: 0.1 is a tenth. The float 0.1 is a little more: 10 decode would need 2 prefill."""
    return Fraction(repr(ratio))


@dataclass(frozen=True, slots=True)
class Pair:
    """Instances of both roles."""

    prefill: int
    decode: int


_ONE_OF_EACH: Final = Pair(1, 1)
"""The smallest pair that runs."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of both numbers. ``min_ratio`` and ``max_ratio``: of prefill to decode. ``most``: each role's maximum.

    Raises:
        ValueError: A ratio is not above 0, or no pair fits.
    """

    min_ratio: Fraction | None = None
    max_ratio: Fraction | None = None
    most: Pair = Pair(UNBOUNDED, UNBOUNDED)

    def __post_init__(self) -> None:
        if any(ratio is not None and ratio <= 0 for ratio in (self.min_ratio, self.max_ratio)):
            raise ValueError(f"{self}: a ratio must be above 0")
        is_empty = self._boxed(_ONE_OF_EACH) != _ONE_OF_EACH
        if is_empty or not self.allows(_settle(_ONE_OF_EACH, self._raised_in_box)):
            raise ValueError(
                f"no 1 to {self.most.prefill} prefill and 1 to {self.most.decode} decode instances have a ratio of "
                f"{self.min_ratio or 'any'} to {self.max_ratio or 'any'}: widen the ratio or raise a maximum"
            )

    def allows(self, pair: Pair) -> bool:
        """Whether these numbers meet all bounds."""
        return pair == Pair(0, 0) or (self._boxed(pair) == pair and self._raised(pair) == pair)

    def fit(self, wish: Pair) -> Pair:
        """The numbers to run with. 0 of both roles stops the pool; 0 of one role alone is raised.

        Take two fitting pairs: the larger number of each role, or the smaller, makes a fitting pair too. So raising the
        roles in turn ends at the smallest fitting pair above the wish. If a maximum forbids that, lowering them ends at
        the largest fitting pair below, which has at least one of each role.
        """
        if wish == Pair(0, 0):
            return wish
        return _settle(_settle(self._boxed(wish), self._raised_in_box), self._lowered)

    def _boxed(self, pair: Pair) -> Pair:
        """Each role at least 1, and at most its maximum."""
        return Pair(min(max(pair.prefill, 1), self.most.prefill), min(max(pair.decode, 1), self.most.decode))

    def _raised_in_box(self, pair: Pair) -> Pair:
        return self._boxed(self._raised(pair))

    def _raised(self, pair: Pair) -> Pair:
        """Each role raised to the least that the ratio allows beside the other role's number."""
        prefill = ceil(self.min_ratio * pair.decode) if self.min_ratio else 0
        decode = ceil(pair.prefill / self.max_ratio) if self.max_ratio else 0
        return Pair(max(pair.prefill, prefill), max(pair.decode, decode))

    def _lowered(self, pair: Pair) -> Pair:
        """Each role lowered to the most that the ratio allows beside the other role's number."""
        prefill = floor(self.max_ratio * pair.decode) if self.max_ratio else pair.prefill
        decode = floor(pair.prefill / self.min_ratio) if self.min_ratio else pair.decode
        return Pair(min(pair.prefill, prefill), min(pair.decode, decode))


def _settle(pair: Pair, change: Callable[[Pair], Pair]) -> Pair:
    while (changed := change(pair)) != pair:
        pair = changed
    return pair
