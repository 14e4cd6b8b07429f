"""Runs a coroutine as ``asyncio.run`` does, except that a silent name server holds up neither a deadline nor the end.

asyncio looks names up in threads of a pool, and ``asyncio.run`` waits for these. A look-up cannot be interrupted and
takes half a minute without an answer, so here each is a thread of its own that no one waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The coroutine's result. Only where no event loop runs."""
    with asyncio.Runner(loop_factory=_PatientLoop) as runner:
        return runner.run(coroutine)


class _PatientLoop(asyncio.SelectorEventLoop):
    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - the parent's word
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        found = self.create_future()
        call = partial(socket.getaddrinfo, host, port, family, type, proto, flags)
        try:
            threading.Thread(target=_look_up, args=(self, found, call), name="look-up", daemon=True).start()
        except RuntimeError as error:  # No thread can be had.
            raise OSError(f"it cannot be looked up: {error}") from error
        return await found


def _look_up(loop: asyncio.AbstractEventLoop, found: asyncio.Future[Any], call: Callable[[], Any]) -> None:
    answer: Any
    try:
        answer = call()
    except (OSError, UnicodeError) as error:
        answer = error
    with contextlib.suppress(RuntimeError):  # The loop is closed: it came too late.
        loop.call_soon_threadsafe(_tell, found, answer)


def _tell(found: asyncio.Future[Any], answer: Any) -> None:
    if found.done():
        return
    if isinstance(answer, Exception):
        found.set_exception(answer)
    else:
        found.set_result(answer)
