"""An access log that a test reads, and the rig that writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from fakes.http import Message
from fakes.router import COMPLETIONS, PROMPT, Rig, running_rig
from patience import PATIENCE_S

TALK: Final[dict[str, Any]] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
KEY: Final = "sk-0123456789abcdef"


class Log:
    """What was logged, once the router has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    @property
    def line(self) -> dict[str, Any]:
        (line,) = self.lines
        return line


@asynccontextmanager
async def logged_rig(log: Log, **settings: Any) -> AsyncIterator[Rig]:
    async with running_rig(access_log=log.path, **settings) as rig:
        yield rig


async def ask(rig: Rig, body: object = PROMPT, path: str = COMPLETIONS, **headers: str) -> Message:
    async with asyncio.timeout(PATIENCE_S):
        return await (await rig.client()).post(path, body, {name.replace("_", "-"): headers[name] for name in headers})


def some(line: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(line[name] for name in names)
