"""H1 to H6: how a client took the service down, or could not use it."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.router_attacks import ATTACKS, MB

from fakes.faults import Fault, Gate
from fakes.router import CHAT, COMPLETIONS, PROMPT
from integration.review.table import finding
from integration.router_scene import Scene, running_scene
from integration.wire_rows import ROWS, send_row
from patience import PATIENCE_S


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


async def at_once(scene: Scene, bodies: list[object], path: str = COMPLETIONS) -> list[int]:
    """Their statuses."""
    answers = await asyncio.gather(*(scene.ask(body, path) for body in bodies))
    return [answer.status for answer in answers]


@finding(
    "H1",
    sent="endless trailers, chunks of 2 bytes, 2.6 million objects, bodies in a row, 8 MB of numbers without a seal",
    must="grow by less than 50 MB, keep all engines, answer a good request",
)
async def fill_the_memory() -> None:
    async with running_scene() as scene:
        await scene.ask(PROMPT)
        Path(f"/proc/{scene.pid}/clear_refs").write_text("5")  # VmHWM begins anew.
        before = scene.num_bytes("VmRSS")
        for attack in (ATTACKS[name] for name in ("t6", "c2", "jb", "pipe", "meta")):
            url = scene.internal_url if attack.is_internal else scene.url
            await asyncio.to_thread(attack.send, address_of(url))
        assert scene.num_bytes("VmHWM") - before < 50 * MB
        assert "engine unhealthy" not in scene.log.read_text()
        assert (await scene.ask(PROMPT)).status == 200


@finding(
    "H2",
    sent="what Java's HttpClient sends, and other upgrades, whose body may look like a request",
    must="ignore the offer: one answer for each request, and the body reaches decode",
)
async def offer_an_upgrade() -> None:
    await send_rows("H2")


async def send_rows(name: str) -> None:
    """All rows of the wire with this name, to one process."""
    async with running_scene() as scene:
        for row in ROWS[name].values():
            await send_row(scene, row)


SEVERAL: list[dict[str, Any]] = [
    {"n": 2.0}, {"n": "2"}, {"n": True}, {"n": 2, "best_of": 2}, {"best_of": 2.0}, {"use_beam_search": "true"},
    {"echo": "true"}, {"echo": 1}, {"prompt_logprobs": 0}, {"prompt": ["a", [1]]}, {"prompt": [["a"], ["b"]]},
]  # fmt: skip


@finding(
    "H3",
    sent="n, best_of, beam search and echo in the spellings that vLLM takes, and lists of prompts",
    must="put no second sequence on a transfer: decode gets no transfer, prefill hears nothing",
)
async def ask_for_several_sequences() -> None:
    async with running_scene() as scene:
        for fields in SEVERAL:
            assert (await scene.ask({**PROMPT, **fields})).status == 200
        assert scene.prefill.seen == []
        assert [seen.params for seen in scene.decode.seen] == [None] * len(SEVERAL)
        assert [{**PROMPT, **fields} for fields in SEVERAL] == [seen.body for seen in scene.decode.seen]


@finding(
    "H4",
    sent="90 requests, 9 at a time, to a pool in which most engines of a role answer 500 at once",
    must="serve at least 60: the engines that fail are left alone",
)
async def ask_a_broken_pool() -> None:
    for num_prefill, num_decode in ((1, 3), (4, 1)):
        async with running_scene("--on-prefill-failure=fail", num_prefill=num_prefill, num_decode=num_decode) as scene:
            *broken, whole = scene.decodes if num_decode > 1 else scene.prefills
            for engine in broken:
                engine.fault = Fault.ERROR_500
            whole.work_s = 0.05
            statuses = [status for _ in range(10) for status in await at_once(scene, [PROMPT] * 9)]
            assert statuses.count(200) >= 60, statuses  # 5 for decode and 9 for prefill before there was a breaker.


IMAGE: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 300_000}"}}],
        }
    ]
}


@finding(
    "H5",
    sent="six images of 300 KB at once; then 20 requests with echo beyond a backlog of 10 tokens and a queue of 2",
    must="prefill all six side by side; admit echo no other than the rest: most get 429",
)
async def go_around_admission() -> None:
    async with running_scene() as scene:
        scene.prefill.close_gate(Gate.PREFILL)
        asked = asyncio.create_task(at_once(scene, [IMAGE] * 6, CHAT))
        for _ in range(6):
            await scene.prefill.next_request()  # None of them has been answered.
        scene.prefill.open_gate(Gate.PREFILL)
        assert await asked == [200] * 6
    flags = ("--max-prefill-backlog-tokens=10", "--max-queued-requests=2", f"--queue-timeout={PATIENCE_S}")
    async with running_scene(*flags) as scene:
        scene.decode.work_s = 3.0  # Longer than 20 requests take to come.
        statuses = await at_once(scene, [{"prompt": "x" * 400, "echo": True}] * 20)
        assert statuses.count(429) >= 10, statuses
        assert statuses.count(200) + statuses.count(429) == 20


@finding(
    "H6",
    sent="requests without a key, with a wrong one and with the right one; what is for the cluster, from a client",
    must="401 without the key; 404 for the cluster's pages; and a start without keys says so",
)
async def ask_without_a_key() -> None:
    async with running_scene() as scene:
        assert any("clients are not authenticated" in line for line in scene.said)
        for path in ("/metrics", "/", "/pdcluster/pool", "/pdcluster/verify", "/v1/metaserver"):
            assert (await scene.ask({}, path)).status in (404, 405), path
            assert (await scene.get(path)).status == 404, path
    with TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        file.write_text(f"{sha256(b'right').hexdigest()}  team-a\n")
        async with running_scene(f"--api-key-file={file}") as scene:
            for key, status in (("", 401), ("wrong", 401), ("right", 200)):
                shown = {"authorization": f"Bearer {key}"} if key else {}
                assert (await scene.ask(PROMPT, headers=shown)).status == status
                assert (await scene.get("/v1/models", headers=shown)).status == status
            assert "right" not in json.dumps([seen.message.headers for seen in scene.decode.seen])
