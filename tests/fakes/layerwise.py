"""Engines with vllm-ascend's own layerwise connector, as the router meets them: from reading release 0.23.0.post1.

Decode posts its reservation under the id that its API layer has made of ``X-Request-Id``, from a thread that is in no
hurry: it looks at no status, has no timeout, and posts again when the connection broke. Then it waits for prefill's
ranks to say "done", counts their addresses, and knows no attempts. Blocks of a request that was ended while it waited
are held until that word comes. ``tests/contract/test_vllm_ascend.py`` holds it against the connector itself.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fakes.answers import json_answer
from fakes.engine import FakeEngine, Seen, Wire
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, request_bytes
from fakes.router import Rig, running_server, until
from fakes.words import GIVEN_UP

NUM_POSTS: Final = 3
RECOMPUTED: Final = b'"finish_reason":"stop","stop_reason":"recomputed"'
BLOCKS: Final = [[3, 4, 5]]


class LayerwiseWire(Wire):
    """The workers of both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()
        """Requests whose blocks decode waits for, or cannot give back."""
        self.torn: list[str] = []
        """Requests that looked whole when ranks of two engines had said so."""
        self._ranks: defaultdict[str, set[str]] = defaultdict(set)

    def done(self, request_id: str, rank: str, num_ranks: int) -> None:
        """One prefill rank says that it has pushed."""
        ranks = self._ranks[request_id]
        ranks.add(rank)
        if len(ranks) < num_ranks:
            return
        if len({name.rpartition("/")[0] for name in ranks}) > 1:
            self.torn.append(request_id)
        del self._ranks[request_id]
        self.held.discard(request_id)
        self.of(request_id).set()


class LayerwiseEngine(FakeEngine):
    """One engine; ``wire`` is a ``LayerwiseWire``."""

    wire: LayerwiseWire
    num_ranks = 2
    num_dead_after: int | None = None
    """Of a prefill engine: so many ranks push before it dies."""
    gives_back = False
    """Of a decode engine: it runs out of KV blocks after the first token (``recompute_scheduler_enable``)."""
    num_broken_posts = 0
    """How many of decode's calls to the metaserver break after they were sent."""
    block_ids: list[list[int]] = BLOCKS
    posts: list[dict[str, Any]]
    replies: list[Message]

    def __init__(self, wire: LayerwiseWire) -> None:
        super().__init__(wire)
        self.posts = []
        self.replies = []

    async def _prefill(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        await self._pass(Gate.PREFILL)
        request_id = request_id_of(seen)
        for rank in range(0 if seen.fault is Fault.GIVE_UP else self.num_ranks):
            if rank == self.num_dead_after:
                return False
            self.wire.done(request_id, f"{self.url}/{rank}", self.num_ranks)
        await self._pass(Gate.REPLY)
        ending = GIVEN_UP if seen.fault is Fault.GIVE_UP else b'"finish_reason":"length"'
        writer.write(json_answer(200, b'{"choices":[{"text":"x",%b}],"kv_transfer_params":null}' % ending))
        return True

    async def _fetch_kv(self, seen: Seen) -> str | None:
        params = seen.params
        if params is None:
            return None
        await self._pass(Gate.RESERVE)
        is_cached = seen.fault is Fault.CACHED
        request_id = request_id_of(seen)
        call = {**posted(request_id), "remote_block_ids": [] if is_cached else self.block_ids}
        thread = asyncio.create_task(self._post(seen, params["metaserver"], call))
        self._background.append(thread)
        if is_cached:
            await thread  # It does not wait for it; so the call comes first, which is the harder case.
        else:
            self.wire.held.add(request_id)
            await self.wire.of(request_id).wait()
        return None

    async def _post(self, seen: Seen, url: str, call: dict[str, Any]) -> None:
        self.posts.append(call)
        authority, _, path = url.removeprefix("http://").partition("/")
        for _ in range(NUM_POSTS):
            client = await RawClient.connect(f"http://{authority}")
            try:
                await client.send(request_bytes(f"/{path}", json.dumps(call).encode()))
                if self.num_broken_posts:
                    self.num_broken_posts -= 1
                    continue
                reply = await client.receive()
                self.replies.append(reply)
                seen.outcome_status = reply.status
                return
            except (asyncio.IncompleteReadError, ConnectionError):
                continue
            finally:
                client.leave()

    def events(self, seen: Seen) -> list[bytes]:
        events = super().events(seen)
        if not self.gives_back:
            return events
        return [events[0], b'data: {"choices":[{"index":0,"text":"",%b}]}\n\n' % RECOMPUTED, events[-1]]

    def answer(self, seen: Seen) -> bytes:
        answer = super().answer(seen)
        return answer.replace(b'"finish_reason": "stop"', RECOMPUTED) if self.gives_back else answer


def request_id_of(seen: Seen) -> str:
    """As vLLM's API layer names the request."""
    given = seen.message.headers["x-request-id"]
    return f"chatcmpl-{given}" if "messages" in seen.body else f"cmpl-{given}-0"


def posted(request_id: str) -> dict[str, Any]:
    """What decode posts for it, and nothing else."""
    return {
        "token_ids": [],
        "request_id": request_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": BLOCKS,
        "remote_block_size": [16],
        "remote_engine_id": "decode-0",
        "remote_host": "127.0.0.1",
        "remote_port": 6000,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }


class LayerwiseRig(Rig):
    """The pieces, of this dialect."""

    prefills: list[LayerwiseEngine]  # type: ignore[assignment]  # a list of a narrower kind, never written to
    decodes: list[LayerwiseEngine]  # type: ignore[assignment]  # as above
    wire: LayerwiseWire

    @property
    def prefill(self) -> LayerwiseEngine:
        return self.prefills[0]

    @property
    def decode(self) -> LayerwiseEngine:
        return self.decodes[0]


@asynccontextmanager
async def running_layerwise_rig(
    *, num_prefill: int = 1, num_decode: int = 1, **settings: Any
) -> AsyncIterator[LayerwiseRig]:
    """A router that speaks their dialect and its engines; no request was ever answered from two engines' KV."""
    wire = LayerwiseWire()
    prefills = [LayerwiseEngine(wire) for _ in range(num_prefill)]
    decodes = [LayerwiseEngine(wire) for _ in range(num_decode)]
    for engine in (*prefills, *decodes):
        await engine.start()
    urls = {"prefill_urls": [e.url for e in prefills], "decode_urls": [e.url for e in decodes]}
    try:
        async with running_server(**{"engine_dialect": "vllm-ascend", **urls, **settings}) as (server, url):
            await until(lambda: all(engine.is_healthy for engine in server.router.services.all_engines()))
            rig = LayerwiseRig(server, url, prefills=list(prefills), decodes=list(decodes))
            rig.wire = wire
            yield rig
            assert wire.torn == []
    finally:
        for engine in (*prefills, *decodes):
            await engine.stop()
