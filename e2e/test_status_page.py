"""The page of a router, as Chromium draws it for somebody with ``kubectl port-forward``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.browser import Tab, browsing
from e2e.subject import INTERNAL_PORT, PORT, SharedPool, Subject, name_of
from integration.harness import complete
from integration.ports import fresh_port
from pdcluster_protocol.labels import Role

PICTURE: Final = "PDCLUSTER_STATUS_PICTURE"
"""Names a file for a picture of the page: ``docs/status.png`` was made so."""
PROMPTS: Final = [f"Where did the time of number {number} go? " * (8 * number) for number in range(1, 6)]
COLUMN: Final = "[...document.querySelectorAll('#{table} tr')].map(row => row.children[{number}].textContent)"
ENGINE_HEALTH: Final = COLUMN.format(table="engines", number=2)
ENGINE_PODS: Final = COLUMN.format(table="engines", number=8)
REQUEST_IDS: Final = COLUMN.format(table="requests", number=1)
BARS: Final = """
[...document.querySelectorAll('.bar')].map(bar => ({
  width: bar.getBoundingClientRect().width,
  parts: [...bar.children].map(part => ({
    width: part.getBoundingClientRect().width, title: part.title, color: getComputedStyle(part).backgroundColor,
  })),
}))
"""
CLEAR: Final = "rgba(0, 0, 0, 0)"


@dataclass(frozen=True, slots=True)
class RouterPage:
    """The page of one router, which gets questions past the Service. ``url``: forwarded by kubectl."""

    url: str
    address: str

    def ask(self, prompt: str) -> str:
        """The request's id, of a question that was answered."""
        answer = str(complete(f"http://{self.address}:{PORT}", prompt, 4).reply["id"])
        return answer.removeprefix("cmpl-")


@contextmanager
def forwarded(pool: Subject) -> Iterator[RouterPage]:
    """The page of the pool's first router."""
    router, port = pool.routers()[0], fresh_port()
    words = ("port-forward", f"pod/{name_of(router)}", f"{port}:{INTERNAL_PORT}")
    with pool.cluster.forwarding(pool.namespace, *words):
        yield RouterPage(f"http://127.0.0.1:{port}", router["status"]["podIP"])


def test_a_browser_shows_the_pool_and_where_the_time_of_its_requests_went(shared: SharedPool) -> None:
    shared.take_on()
    pool = shared.subject
    pods = {name_of(pod) for role in Role for pod in pool.pods(role)}
    asyncio.run(see(pool, pods))


async def see(pool: Subject, pods: set[str]) -> None:
    async with browsing() as tab:
        with forwarded(pool) as page:
            asked = [await asyncio.to_thread(page.ask, prompt) for prompt in PROMPTS]
            await tab.open(f"{page.url}/status")
            await shown(tab, asked)
            assert set(await tab.evaluate(ENGINE_PODS)) == pods
            assert set(await tab.evaluate(ENGINE_HEALTH)) == {"well"}
            await check_bars(tab)
            await keeps_up(tab, page)
            assert {url.removeprefix(page.url) for url in tab.urls} == {"/status", "/pdcluster/status"}
            assert tab.problems == []
            if picture := os.environ.get(PICTURE):
                Path(picture).write_bytes(await tab.picture())
        await tab.until("document.getElementById('note').textContent.startsWith('No answer from the router')")
        assert set(await tab.evaluate(ENGINE_PODS)) == pods, "it goes on showing what it knew"


async def shown(tab: Tab, asked: list[str]) -> None:
    """The page has a row for each of these."""
    await tab.until(f"(ids => {asked}.every(one => ids.includes(one)))({REQUEST_IDS})")


async def check_bars(tab: Tab) -> None:
    """Each bar is as wide as its column, its parts fill it, and each has a color and words."""
    bars = await tab.evaluate(BARS)
    assert len(bars) >= len(PROMPTS)
    assert len({round(bar["width"]) for bar in bars}) == 1
    for bar in bars:
        assert abs(sum(part["width"] for part in bar["parts"]) - bar["width"]) < 1 < bar["width"]
        assert all(part["title"] and part["color"] != CLEAR for part in bar["parts"]), bar


async def keeps_up(tab: Tab, page: RouterPage) -> None:
    """A further request appears without loading the page anew."""
    loaded_at = await tab.evaluate("performance.timeOrigin")
    await shown(tab, [await asyncio.to_thread(page.ask, "And of a later one?")])
    assert await tab.evaluate("performance.timeOrigin") == loaded_at
