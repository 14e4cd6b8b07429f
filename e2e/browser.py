"""A real Chromium without a screen, spoken to by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp

START_S: Final = 60.0
CALL_S: Final = 60.0
POLL_S: Final = 0.2
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
# Root has no sandbox. The rest keeps it from the network, and from memory that a container does not have.
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--window-size=1600,900",
    "--remote-debugging-port=0",
)
_LISTENING: Final = re.compile(rb"DevTools listening on ws://([\d.:]+)/")


@dataclass
class Tab:
    """One tab. Event loop only. ``urls``: what it has asked for. ``problems``: errors of scripts, and what the browser
    itself complains about, as a broken policy."""

    socket: aiohttp.ClientWebSocketResponse
    urls: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """The value of this expression, as JSON has it."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str, limit_s: float = CALL_S) -> Any:
        """The value of this expression, once it is true."""
        async with asyncio.timeout(limit_s):
            while not (value := await self.evaluate(script)):
                await asyncio.sleep(POLL_S)
        return value

    async def picture(self) -> bytes:
        """PNG of the whole page."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_S):
            told = await answer
        assert "error" not in told, f"{method}: {told['error']}"
        return dict(told["result"])

    async def listen(self) -> None:
        """Takes what the browser says until it ends."""
        async for message in self.socket:
            told = message.json()
            if "id" not in told:
                self._note(told["method"], told["params"])
            elif not (answer := self._answers.pop(told["id"])).done():
                answer.set_result(told)
        for answer in self._answers.values():
            answer.cancel("the browser has ended")

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@asynccontextmanager
async def browsing() -> AsyncIterator[Tab]:
    """The first tab of a new browser, which ends with the ``with``."""
    with TemporaryDirectory(prefix="pdcluster-browser-", ignore_cleanup_errors=True) as folder:
        said = Path(folder) / "stderr"
        with said.open("wb") as stderr:
            command = (_program(), *FLAGS, f"--user-data-dir={folder}/profile", "about:blank")
            process = await asyncio.create_subprocess_exec(*command, stderr=stderr, cwd=Path("/"))
        try:
            async with asyncio.timeout(START_S):
                place = await _place(process, said)
            async with aiohttp.ClientSession() as session, _tab(session, place) as tab:
                yield tab
        finally:
            with suppress(ProcessLookupError):  # It has ended by itself.
                process.kill()
            await process.wait()


def _program() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, f"none of {', '.join(NAMES)} is here: install one (Debian: apt-get install chromium)"
    return found


async def _place(process: asyncio.subprocess.Process, said: Path) -> str:
    """Host and port at which the browser is spoken to. ``said``: its stderr."""
    while (found := _LISTENING.search(said.read_bytes())) is None:
        assert process.returncode is None, f"the browser did not start: {said.read_text(errors='replace')[-2000:]}"
        await asyncio.sleep(POLL_S)
    return found[1].decode()


@asynccontextmanager
async def _tab(session: aiohttp.ClientSession, place: str) -> AsyncIterator[Tab]:
    async with session.get(f"http://{place}/json/list") as answer:
        (url,) = [one["webSocketDebuggerUrl"] for one in await answer.json() if one["type"] == "page"]
    async with session.ws_connect(url, max_msg_size=1 << 26) as socket:
        tab = Tab(socket)
        listening = asyncio.create_task(tab.listen())
        try:
            yield tab
        finally:
            listening.cancel()
