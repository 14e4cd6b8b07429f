"""Verifies a revision by a real request through one pair of it. Only KV that prefill computed and pushed counts.

The request goes the way of a client's request (``Exchange``), on other terms: only this pair, one attempt, decode may
not recompute, and its answer carries a receipt. ``core/requests/verification.py`` decides what counts as proof. The
request counts in the metrics like any other. It holds its share of prefill's backlog, but does not queue for it: a busy
pool must not look like a broken one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from pdcluster_protocol.labels import Role
from pdcluster_protocol.params import Reservation, receipt_in
from pdcluster_protocol.verify import VerifiedEngine, VerifyAnswer, VerifyOrder
from pdcluster_router.core.apis.client_apis import OPENAI
from pdcluster_router.core.apis.openai_errors import (
    RefusedRequest,
    message_of,
    not_verifiable,
    not_verified,
    nothing_to_verify,
    too_many_verifications,
)
from pdcluster_router.core.apis.rewrite import parse_body
from pdcluster_router.core.clients.room import Room
from pdcluster_router.core.engines.catalog import base_of
from pdcluster_router.core.engines.membership import EngineState
from pdcluster_router.core.requests.dialect import Posted
from pdcluster_router.core.requests.pairing import Retries, Timeouts
from pdcluster_router.core.requests.verification import (
    FIRST_WORDS,
    Asked,
    Trial,
    next_num_words,
    num_random_bytes,
    problem_of,
    prompt_of,
)
from pdcluster_router.core.telemetry.scrub import scrub
from pdcluster_router.engines.engine import Engine
from pdcluster_router.engines.roster import Terms
from pdcluster_router.http.cycle import NO_HEAD, HotCycle
from pdcluster_router.requests.exchange import Exchange
from pdcluster_router.requests.request import ClientRequest
from pdcluster_router.services import Services

logger = logging.getLogger(__name__)

MAX_RUNNING: Final = 4
"""The most verifications at a time. 4: an operator asks one for each revision; more would be load, not proof."""
_VERIFIED: Final = "verified revision=%s prefill=%s decode=%s seconds=%.3f tokens=%d content=compared"
_NOT_VERIFIED: Final = "not verified revision=%s prefill=%s decode=%s seconds=%.3f reason=%s"
_PATH: Final = b"/v1/completions"
_NUM_TOKENS: Final = 2
"""Tokens of the answer: the first comes from the pushed KV, the second from a step of decode alone."""
_POLL_S: Final = 0.01
_LEAST_S: Final = 0.001
"""The seconds of a trial that begins too late: it ends like any request whose time is over."""
_ONCE: Final = Retries(max_prefill_attempts=1, max_decode_attempts=1, recomputes=False)


@dataclass(frozen=True, slots=True)
class EnginePair:
    """The two engines of one verification."""

    prefill: Engine
    decode: Engine


class Verifier:
    """All verifications of one router. Event loop only."""

    def __init__(self, services: Services, engine_line: bytes) -> None:
        """``engine_line``: the header line with the engine key; empty when the engines want none."""
        self._services = services
        self._engine_line = engine_line
        self._num_running = 0

    async def verify(self, order: VerifyOrder) -> VerifyAnswer:
        """Proves that KV is pushed through a pair of this revision. Takes ``order.timeout_s`` at most.

        Raises:
            RefusedRequest: No proof, and why: 409 when a request proved nothing, 503 when an engine is missing, 429
                when too many verifications run, 501 when these engines cannot prove it.
        """
        if no_proof := self._services.dialect.no_proof:
            raise RefusedRequest(not_verifiable(no_proof))
        if self._num_running >= MAX_RUNNING:
            raise RefusedRequest(too_many_verifications(MAX_RUNNING))
        self._num_running += 1
        try:
            return await self._verify(order)
        finally:
            self._num_running -= 1

    async def _verify(self, order: VerifyOrder) -> VerifyAnswer:
        began_at = self._services.now()
        pair = self._pair(order)
        trial = await self._prove(pair, began_at + order.timeout_s)
        seconds = self._services.now() - began_at
        problem = problem_of(trial)
        names = (order.revision or "-", pair.prefill.name, pair.decode.name)
        if problem:
            reason = f"{_name(pair.prefill)} and {_name(pair.decode)}: {scrub(problem)}"
            logger.warning(_NOT_VERIFIED, *names, seconds, reason)
            raise RefusedRequest(not_verified(reason))
        assert trial.asked is not None
        assert trial.receipt is not None
        logger.info(_VERIFIED, *names, seconds, trial.asked.num_tokens)
        return VerifyAnswer(
            revision=order.revision,
            prefill=VerifiedEngine(pair.prefill.name, pair.prefill.pod),
            decode=VerifiedEngine(pair.decode.name, pair.decode.pod),
            prompt_tokens=trial.asked.num_prompt_tokens,
            pushed_tokens=trial.asked.num_tokens,
            block_tokens=trial.asked.block_tokens,
            transfer_protocol=trial.receipt.pdcluster_transfer_protocol,
            seconds=round(seconds, 3),
        )

    def _pair(self, order: VerifyOrder) -> EnginePair:
        prefill, decode = (_choose(self._services.engines[role], order, role) for role in (Role.PREFILL, Role.DECODE))
        if isinstance(prefill, Engine) and isinstance(decode, Engine):
            return EnginePair(prefill, decode)
        missing = [one for one in (prefill, decode) if isinstance(one, str)]
        raise RefusedRequest(nothing_to_verify("; ".join(missing)))

    async def _prove(self, pair: EnginePair, deadline: float) -> Trial:
        """The trial that proves most, or the one that shows why there is no proof."""
        proof: Trial | None = None
        num_words: int | None = FIRST_WORDS
        while num_words is not None:
            trial = await self._try(pair, num_words, deadline)
            num_words = next_num_words(trial)
            if not problem_of(trial):
                proof = trial
            elif not trial.is_prompt_refused:
                return trial
        return proof or trial

    async def _try(self, pair: EnginePair, num_words: int, deadline: float) -> Trial:
        answer = _CollectedAnswer()
        cycle = HotCycle(answer, _PATH, NO_HEAD, _never, Room(0))
        cycle.keep_alive = cycle.takes_chunks = False  # So that what is written is head and body, without framing.
        exchange = Exchange(self._services, cycle, self._request(pair, num_words, deadline))
        exchange.start()
        try:
            await answer.is_whole.wait()
            while exchange in self._services.running:  # Prefill's own answer may come after decode's.
                await asyncio.sleep(_POLL_S)
        finally:
            cycle.gone()  # Ends the exchange if we are cancelled; else it is over.
        return _trial_of(num_words, answer, exchange)

    def _request(self, pair: EnginePair, num_words: int, deadline: float) -> ClientRequest:
        services = self._services
        left_s = max(_LEAST_S, deadline - services.now())
        request_id = f"verify-{services.new_transfer_id()}"
        request = ClientRequest(
            path=_PATH,
            headers=b"content-type: application/json\r\nx-request-id: %b\r\n%b"
            % (request_id.encode(), self._engine_line),
            request_id=request_id,
            api=OPENAI,
            body=parse_body(_body_of(num_words)),
            timeouts=Timeouts(left_s, left_s, left_s),
            terms=_terms_of(pair, services),
            has_transfer=True,
            client="",
            received_at=services.now(),
        )
        admission = request.terms.admissions[Role.PREFILL]
        admission.take_again(admission.share_of(request.body.estimated_prompt_tokens))
        return request


class _CollectedAnswer:
    """Collects the answer of an exchange, in place of a client's connection."""

    is_full: Final = False

    def __init__(self) -> None:
        self.is_whole = asyncio.Event()
        self._raw = bytearray()

    def write(self, data: bytes) -> None:
        self._raw += data

    def answered(self) -> None:
        self.is_whole.set()

    def close(self, *, with_reset: bool = False) -> None:
        """There is nothing to close."""

    @property
    def status(self) -> int:
        """The status in the status line: ``HTTP/1.1 200 OK``."""
        return int(self._raw.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        return bytes(self._raw.partition(b"\r\n\r\n")[2])


def _never(_: HotCycle) -> None:
    """The cycle has no body to read."""


def _body_of(num_words: int) -> bytes:
    """The body of a request of ``num_words``. It names no model, so that an engine uses the one it has."""
    prompt = prompt_of(num_words, os.urandom(num_random_bytes(num_words)))
    return orjson.dumps({"prompt": prompt, "max_tokens": _NUM_TOKENS, "ignore_eos": True, "temperature": 0})


def _terms_of(pair: EnginePair, services: Services) -> Terms:
    queue = services.admissions.model_of(base_of((pair.decode,)))
    return Terms(
        place_decode=lambda _, tried: None if pair.decode in tried else pair.decode,
        place_prefill=lambda _, tried, __: None if pair.prefill in tried else pair.prefill,
        retries=_ONCE,
        admissions=services.admissions.find(queue) or services.admissions.shared,
        queue=queue,
        wants_receipt=True,
    )


def _trial_of(num_words: int, answer: _CollectedAnswer, exchange: Exchange) -> Trial:
    outcome = exchange.calls.outcome
    if outcome is None:
        prefill_problem = "the request ended before its prefill"
    else:
        prefill_problem = "" if outcome.is_ok else outcome.reason or "prefill failed"
    error = "" if answer.status == 200 else f"{answer.status}: {message_of(answer.body)}"
    return Trial(
        num_words=num_words,
        status=answer.status,
        error=error if exchange.is_done or error else "the answer was cut",
        asked=_asked_by(exchange.calls.reservation),
        prefill_problem=prefill_problem,
        receipt=receipt_in(answer.body),
    )


def _asked_by(reservation: Posted | None) -> Asked | None:
    if not isinstance(reservation, Reservation):
        return None
    num_tokens = reservation.num_prompt_tokens - reservation.remote_cached_tokens
    return Asked(reservation.num_prompt_tokens, num_tokens, max(reservation.block_sizes, default=0))


def _choose(engines: Sequence[Engine], order: VerifyOrder, role: Role) -> Engine | str:
    """The engine of this role to ask; or why there is none, with the state of each engine that is there."""
    known = [engine for engine in engines if engine.revision == order.revision]
    pods = order.pods(role)
    wanted = [engine for engine in known if pods is None or engine.pod in pods]
    ready = [engine for engine in wanted if engine.state is EngineState.SERVING and engine.is_healthy]
    if ready:
        return min(ready, key=lambda engine: (engine.load.outstanding_tokens, engine.load.placed_at))
    revision = f"revision {order.revision!r}" if order.revision else "this pool"
    what = f"no {role.value} engine of {revision} is ready and answers its /health"
    if wanted:
        return f"{what}: {', '.join(map(_state_of, wanted))}"
    return f"{what}: this router knows {len(known)} of them" + (", none of the pods asked for" if known else "")


def _state_of(engine: Engine) -> str:
    is_unhealthy = engine.state is EngineState.SERVING and not engine.is_healthy
    return f"{_name(engine)} is {'unhealthy' if is_unhealthy else engine.state.value}"


def _name(engine: Engine) -> str:
    return f"{engine.name} ({engine.pod})" if engine.pod else engine.name
