"""A prefill engine and a decode engine that keep the decode-first contract, without a model.

Decode POSTs its reservation to the metaserver it is told, and streams after the outcome and the push (the ``Wire``,
shared by both). Prefill pushes and answers one token. ``Fault`` says what goes wrong; ``gates`` stop an engine at a
step until the test opens them. As vLLM, decode sends the head of a stream before it knows whether the request will
work, and an engine sees that it must abort by its connection being closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fakes.answers import END, QUESTIONS, STREAM_HEAD, answer, chunk, json_answer, models_answer, simple_answer
from fakes.faults import Fault, Gate
from fakes.http import Message, RawClient, read_body, read_head
from fakes.kinds import KINDS
from fakes.reservations import CACHED_TOKENS, PROMPT_TOKENS, SECRET, local_prefill_of, reservation_call, reservation_of
from fakes.words import OpenAIWords
from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_protocol.secret import Secret
from pdcluster_router.engines.engine import MAX_FETCHED_BYTES


class Wire:
    """The push: who waits for a transfer's KV is woken when prefill has written it."""

    def __init__(self) -> None:
        self._arrived: dict[str, asyncio.Event] = {}

    def of(self, transfer_id: str) -> asyncio.Event:
        return self._arrived.setdefault(transfer_id, asyncio.Event())


@dataclass
class Seen:
    """One request that an engine got."""

    message: Message
    body: dict[str, Any]
    fault: Fault
    outcome: dict[str, Any] | None = None
    outcome_status: int | None = None
    num_lost: int = 0
    """Attempts that decode has given up."""
    num_received: int = 0
    """Tokens that were pushed to decode."""
    is_disconnected: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")


class FakeEngine:
    """One engine on a port of its own. ``tokens``: what decode streams."""

    def __init__(self, wire: Wire, secret: Secret = SECRET) -> None:
        self.wire = wire
        self.secret = secret
        self.fault = Fault.NONE
        self.faults_to_come: list[Fault] = []
        """What goes wrong with the next requests, one each; ``fault`` counts after them."""
        self.num_losses = 0
        """How often decode, told ok, still says that the attempt was lost."""
        self.tokens = ["Hello", ",", " world", "!"]
        self.seen: list[Seen] = []
        self.arrivals: asyncio.Queue[Seen] = asyncio.Queue()
        self.num_connections = 0
        self.hang_up = asyncio.Event()
        """Set to let ``HANG_UP_ON_METASERVER`` hang up."""
        self.padding = ""
        self.is_parrot = False
        """Whether an answer has its request's id, and says what it was asked for before all else: prompt and seed."""
        self.work_s = 0.0
        """Seconds that it computes before it answers."""
        self.token_s = 0.0
        """Seconds between two tokens of a stream."""
        self.raw = b""
        self.health_status: int | None = 200
        """Of its ``/health``. None: no answer, as from a process that is stopped."""
        self.models_status = 200
        self.models = models_answer("m")
        """Its answer to ``GET /v1/models``."""
        self.num_questions = 0
        self.question_fault = Fault.NONE
        """``DIE``, ``HANG`` or ``TOO_MUCH``: how it fails at what it answers without its core."""
        self.num_lists = 0
        """How often it was asked for that."""
        self.list_headers: dict[str, str] = {}
        """Of the last time."""
        self.gives_receipts = True
        self.compares_content = True
        self._gates: dict[Gate, asyncio.Event] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self.open_connections: set[asyncio.StreamWriter] = set()
        self._idle_connections: set[asyncio.StreamWriter] = set()
        self._shuts_down = False
        self._background: list[asyncio.Task[Message | None]] = []
        self._server: asyncio.Server | None = None
        self.url = ""

    async def start(self, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self._shuts_down = False
        self._server = await asyncio.start_server(
            self._connected, host, port or fresh_port(), limit=1 << 24, backlog=1024, ssl=tls
        )
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """The port is closed and every connection is cut."""
        assert self._server is not None
        self._server.close()
        tasks = [*self._connections, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refuse_connections(self) -> None:
        """As vLLM after SIGTERM: nothing listens, and a connection is closed once it has no request."""
        assert self._server is not None
        self._shuts_down = True
        self._server.close()
        for writer in self._idle_connections:
            writer.close()

    def hang_up_on_all(self) -> None:
        """Every connection is closed, as by a server whose idle time is over. At once: the loop does not run."""
        for writer in self.open_connections:
            if (own := writer.get_extra_info("socket")) is None:
                continue  # It has ended already; or it ends just now.
            with suppress(OSError), socket.socket(fileno=os.dup(own.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)

    def say(self, raw: bytes) -> None:
        """Every connection gets ``raw``, which nobody asked for."""
        for writer in self.open_connections:
            writer.write(raw)

    def close_gate(self, gate: Gate) -> None:
        self._gates[gate] = asyncio.Event()

    def open_gate(self, gate: Gate) -> None:
        self._gates[gate].set()

    async def next_request(self) -> Seen:
        async with asyncio.timeout(PATIENCE_S):
            return await self.arrivals.get()

    async def _pass(self, gate: Gate) -> None:
        if gate in self._gates:
            await self._gates[gate].wait()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.open_connections.add(writer)
            # Also one that was open before, and whose task had not begun when the others were closed.
            while not self._shuts_down and await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open_connections.discard(writer)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self._idle_connections.add(writer)
        try:
            message = await read_body(reader, await read_head(reader))
        finally:
            self._idle_connections.discard(writer)
        if message.path == "/health" and self.health_status != 200:
            return await self._say_unwell(reader, writer)
        if message.path == "/v1/models":
            self.num_lists += 1
            self.list_headers = message.headers
            writer.write(json_answer(self.models_status, self.models if self.models_status == 200 else b"{}"))
            return True
        if simple := simple_answer(message):
            return await self._say_simply(reader, writer, simple, is_question=message.path in QUESTIONS)
        fault = self.faults_to_come.pop(0) if self.faults_to_come else self.fault
        seen = Seen(message, json.loads(message.body), fault)
        self.seen.append(seen)
        self.arrivals.put_nowait(seen)
        work = asyncio.create_task(self._work(seen, writer))
        hang_up = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            seen.is_disconnected = not work.done()
            return not seen.is_disconnected and await work
        finally:
            work.cancel()
            hang_up.cancel()
            _, byte = await asyncio.gather(work, hang_up, return_exceptions=True)
            if isinstance(byte, bytes):
                reader._buffer[:0] = byte  # type: ignore[attr-defined]  # of the next request, which came at once
            seen.ended.set()

    async def _say_simply(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, simple: bytes, *, is_question: bool
    ) -> bool:
        self.num_questions += is_question
        match self.question_fault if is_question else Fault.NONE:
            case Fault.DIE:
                return False
            case Fault.HANG:
                await reader.read(1)
                return False
            case (Fault.MUCH | Fault.TOO_MUCH) as fault:
                writer.write(json_answer(200, b"x" * (MAX_FETCHED_BYTES + (fault is Fault.TOO_MUCH))))
            case _:
                writer.write(simple)
        return True

    async def _say_unwell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self.health_status is None:
            await reader.read(1)  # Until the router hangs up.
            return False
        writer.write(answer(self.health_status, "text/plain", b""))
        return True

    async def _work(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be kept."""
        early = await self._early_fault(seen, writer)
        if early is not None:
            return early
        params = seen.params or {}
        if params.get("do_remote_decode"):
            await asyncio.sleep(self.work_s)
            return await self._prefill(seen, writer)
        return await self._decode(seen, writer)

    async def _early_fault(self, seen: Seen, writer: asyncio.StreamWriter) -> bool | None:
        fault, error = seen.fault, self._words(seen).error
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        if fault is Fault.DIE:
            return False
        answers = {
            Fault.RAW: self.raw,
            Fault.ERROR_500: json_answer(500, error("engine says no", 500)),
            Fault.ERROR_503: json_answer(503, error("engine is overloaded", 503)),
            Fault.ERROR_404: json_answer(404, error("The model `x` does not exist.", 404)),
            Fault.ERROR_TEXT: answer(500, "text/plain", b"Internal Server Error"),
            Fault.EMPTY_200: json_answer(200, b""),
            Fault.NOT_HTTP: b"SSH-2.0-OpenSSH_9.2\r\n",
            Fault.TOO_MUCH: json_answer(200, b'{"n":1}') + json_answer(200, b'{"n":2}'),
        }
        if fault not in answers:
            return None
        writer.write(answers[fault])
        return True

    async def _prefill(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        assert seen.params is not None
        await self._pass(Gate.PREFILL)
        self.wire.of(seen.params["transfer_id"]).set()
        await self._pass(Gate.REPLY)
        words = self._words(seen)
        writer.write(json_answer(200, words.one_token_given_up() if seen.fault is Fault.GIVE_UP else words.one_token()))
        return True

    async def _decode(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        if seen.body.get("stream"):
            writer.write(STREAM_HEAD + b"".join(map(chunk, self.events(seen)[: self._words(seen).num_early])))
        problem = await self._fetch_kv(seen)
        await self._pass(Gate.ANSWER)
        await asyncio.sleep(self.work_s)
        if seen.fault in (Fault.DIE_WITH_KV, Fault.LOCAL_AND_DIE):
            return False
        if problem is not None:
            self._write_problem(seen, problem, writer)
        elif seen.body.get("stream"):
            await self._stream(seen, writer)
        else:
            is_given_up = seen.fault is Fault.GIVE_UP
            writer.write(json_answer(200, self._words(seen).whole_given_up() if is_given_up else self.answer(seen)))
        return True

    async def _fetch_kv(self, seen: Seen) -> str | None:
        """Reserve, wait for the outcome and the push. Returns why it failed."""
        params = seen.params
        if params is None or not params.get("do_remote_prefill") or seen.fault is Fault.CACHED:
            return None
        await self._pass(Gate.RESERVE)
        if seen.fault in (Fault.LOCAL, Fault.LOCAL_AND_DIE):
            await self._say(params["metaserver"], local_prefill_of(params))
            return None
        if seen.fault is Fault.GO_ON_AFTER_PUSH:
            self._background.append(asyncio.create_task(self._reserve(seen, params)))
            await self._receive(seen)
            return None
        reply = await self._reserve(seen, params)
        while reply is not None and _is_ok(reply) and self.num_losses:
            self.num_losses -= 1
            seen.num_lost += 1
            reply = await self._reserve(seen, params, lost_attempt=seen.num_lost, lost_reason="a lease has lapsed")
        if reply is None:
            return "gave up on the metaserver"
        seen.outcome_status, seen.outcome = reply.status, reply.json()
        if seen.fault is Fault.IGNORE_OUTCOME or _is_ok(reply):
            await self._receive(seen)
            return None
        return None if seen.fault is Fault.RECOMPUTE else "Internal server error"

    async def _receive(self, seen: Seen) -> None:
        await self.wire.of((seen.params or {})["transfer_id"]).wait()
        seen.num_received = PROMPT_TOKENS - CACHED_TOKENS

    async def _reserve(self, seen: Seen, params: dict[str, Any], **changes: Any) -> Message | None:
        hangs_up = seen.fault is Fault.HANG_UP_ON_METASERVER
        return await self._say(params["metaserver"], reservation_of(params, **changes), hangs_up=hangs_up)

    async def _say(self, metaserver: str, said: dict[str, Any], *, hangs_up: bool = False) -> Message | None:
        scheme, _, host, path = metaserver.split("/", 3)
        client = await RawClient.connect(f"{scheme}//{host}")
        try:
            await client.send(reservation_call(said, self.secret, f"/{path}"))
            if hangs_up:
                await self.hang_up.wait()
                return None
            return await client.receive()
        finally:
            client.leave()

    def _write_problem(self, seen: Seen, problem: str, writer: asyncio.StreamWriter) -> None:
        if seen.body.get("stream"):
            if self._words(seen).cuts_errors:
                raise ConnectionResetError
            writer.write(b"".join(map(chunk, self._words(seen).error_events(problem))) + END)
        else:
            writer.write(json_answer(500, self._words(seen).error(problem, 500)))

    async def _stream(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        num_early = self._words(seen).num_early
        for index, event in list(enumerate(self.events(seen)))[num_early:]:
            if index:
                await asyncio.sleep(self.token_s)
            if index == self._words(seen).num_first:
                await self._pass(Gate.SECOND_TOKEN)
                if seen.fault is Fault.DIE_MID_STREAM:
                    raise ConnectionResetError
                if seen.fault is Fault.ERROR_MID_STREAM:
                    writer.write(chunk(b"".join(self._words(seen).error_events("EngineCore died"))))
                    break
                if seen.fault is Fault.GIVE_UP:
                    writer.write(b"".join(map(chunk, self._words(seen).events_given_up())))
                    break
            writer.write(chunk(event))
            await writer.drain()
        writer.write(END)

    def events(self, seen: Seen) -> list[bytes]:
        """The events of a streamed answer, byte for byte."""
        return self._words(seen).events()

    def answer(self, seen: Seen) -> bytes:
        """An answer that is not streamed, byte for byte."""
        return self._words(seen).whole()

    def _words(self, seen: Seen) -> OpenAIWords:
        kind = KINDS.get(seen.message.path, OpenAIWords)
        if not self.is_parrot:
            return kind(seen.body, self.tokens, self.padding, self._receipt(seen))
        tokens = [said_by(seen.body), *self.tokens]
        return kind(seen.body, tokens, self.padding, self._receipt(seen), seen.message.headers["x-request-id"])

    def _receipt(self, seen: Seen) -> dict[str, object] | None:
        is_wanted = self.gives_receipts and (seen.params or {}).get("wants_receipt")
        said: dict[str, object] = {
            "pdcluster_received_tokens": seen.num_received,
            "pdcluster_is_content_compared": self.compares_content,
            "pdcluster_transfer_protocol": "tcp",
        }
        return said if is_wanted else None


def said_by(body: dict[str, Any]) -> str:
    """The first word of a parrot."""
    asked = body.get("prompt", body.get("messages"))
    return f"{json.dumps(asked)} seed {body.get('seed')}: "


def _is_ok(reply: Message) -> bool:
    return reply.status == 200 and bool(reply.json()["status"] == "ok")
