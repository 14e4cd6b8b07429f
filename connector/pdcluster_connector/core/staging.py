"""Which bytes of a staging memory are taken. First fit, so that rooms may come back in any order."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class SpanPool:
    """``capacity`` bytes, handed out in disjoint spans that start at multiples of ``alignment``."""

    capacity: int
    alignment: int = 64
    _free: list[tuple[int, int]] = field(init=False)
    """Spans [start, stop), ascending; no two touch."""
    _taken: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.capacity -= self.capacity % self.alignment
        self._free = [(0, self.capacity)] if self.capacity else []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    def take(self, num_bytes: int) -> int | None:
        """The start of a span of at least ``num_bytes`` (one or more); None when there is no room for it now."""
        needed = -(-num_bytes // self.alignment) * self.alignment
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= needed:
                self._free[index : index + 1] = [(start + needed, stop)] if stop - start > needed else []
                self._taken[start] = needed
                return start
        return None

    def give_back(self, start: int) -> None:
        """The span that was taken at ``start`` is free.

        Raises:
            KeyError: None was.
        """
        insort(self._free, (start, start + self._taken.pop(start)))
        merged = self._free[:1]
        for span in self._free[1:]:
            if span[0] == merged[-1][1]:
                merged[-1] = (merged[-1][0], span[1])
            else:
                merged.append(span)
        self._free = merged
