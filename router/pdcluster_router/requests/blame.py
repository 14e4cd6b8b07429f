"""Tells engines that they failed a request: at once, or when another engine has shown that the request can be served.

One ``Suspects`` for each role that serves a request. ``core/engines/breaker.py`` decides what an outcome means for an
engine.
"""

from __future__ import annotations

from pdcluster_router.core.engines.breaker import Blame, Era
from pdcluster_router.engines.engine import Engine
from pdcluster_router.http.connection import ResponseLost


class Suspects:
    """The engines of one role that may be to blame for failing one request. Owned by the leg; made when needed."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: tuple[tuple[Engine, Era], ...] = ()

    def failed(self, engine: Engine, era: Era, num_tokens: int, blame: Blame) -> None:
        """``engine`` has failed a request of ``num_tokens``."""
        if blame is Blame.NOBODY:
            return
        engine.weigh_down(num_tokens)
        if blame is Blame.ENGINE:
            engine.failed(era)
        else:
            self._found += ((engine, era),)

    def accuse(self) -> None:
        """Another engine has served the request: count a failure for each engine recorded here."""
        found, self._found = self._found, ()
        for engine, era in found:
            engine.failed(era)

    def close(self, *, num_asked: int) -> None:
        """The request is over. If only one engine was asked, its failure counts."""
        if num_asked == 1:
            self.accuse()


def blame_for(lost: ResponseLost) -> Blame:
    """The blame for a call that brought no whole answer.

    An engine that cannot be reached is to blame at once. An engine that hangs up may have been killed by the request
    itself, and a client could send such a request to every engine. So another engine must serve the request first.
    """
    if lost.is_ours:
        return Blame.NOBODY
    return Blame.ENGINE if lost.is_unsent else Blame.PERHAPS
