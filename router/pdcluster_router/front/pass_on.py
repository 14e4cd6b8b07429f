"""Passes questions that need no KV on to a decode engine, and the engine's answer back unchanged.

Such a question needs neither a pair nor a place in the queue: vLLM answers it without its engine's core (vLLM 0.32
``entrypoints/serve/tokenize``, ``entrypoints/anthropic``). If an engine hangs up, the router asks another one, since
questions change nothing. But a large question that takes too long, or one whose answer is too large, is sent to one
engine only. It blocks that engine's tokenizer, and would block the next one's. A small one may only have waited for
such a question of another client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fastapi import Request

from pdcluster_router.core.apis.openai_errors import (
    NO_DECODE,
    RefusedRequest,
    body_too_large,
    draining,
    no_engine,
    unanswered,
)
from pdcluster_router.core.apis.rewrite import BadBody, parse_body
from pdcluster_router.core.clients.room import RoomLimit
from pdcluster_router.engines.engine import Engine, NoWholeAnswer
from pdcluster_router.front.pages import page_of
from pdcluster_router.front.router import Router
from pdcluster_router.http.answers import Fetched

QUESTIONS: Final = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""Each takes a POST."""
SMALL_BYTES: Final = 64 << 10
"""A question of so many bytes, or fewer, is small: a tokenizer takes milliseconds for it."""
VERSION: Final = "/version"
"""A GET."""
TIMEOUT_S: Final = 30.0
"""The time for one question, with all engines that it is sent to. A text of 8 MiB takes a tokenizer some seconds."""


async def pass_on(router: Router, request: Request) -> Fetched:
    """A decode engine's answer, of any status. The body of ``request`` counts in the router's room.

    Raises:
        RefusedRequest: The router drains, the body is too large, there is no room for it, no engine serves its
            model, no decode engine can be reached, or one gives no whole answer.
    """
    if router.is_draining:
        raise RefusedRequest(draining())
    taken = 0
    body = bytearray()
    try:
        async for part in request.stream():
            if len(body) + len(part) > router.settings.max_body_bytes:
                raise RefusedRequest(body_too_large(router.settings.max_body_bytes))
            if not router.room.take(len(part), RoomLimit.CLIENTS):
                raise RefusedRequest(router.no_room())
            taken += len(part)
            body += part
        router.num_asking += 1
        try:
            return await _ask(router, request, bytes(body) if request.method == "POST" else None)
        finally:
            router.num_asking -= 1
    finally:
        router.room.give_back(taken)


async def _ask(router: Router, request: Request, body: bytes | None) -> Fetched:
    tried: list[Engine] = []
    other_decode, body = _for_its_model(router, body)
    reason, page = NO_DECODE, page_of(request)
    headers = router.access.line_for_engines(request.headers.raw)
    if body is not None:
        headers += b"content-type: %b\r\n" % request.headers.get("content-type", "application/json").encode("latin-1")
    path = request.scope["path"].rstrip()  # A route also matches with a line's end behind it.
    now, most, num_lost = router.services.now, router.settings.max_decode_attempts, 0
    deadline = now() + TIMEOUT_S
    num_shares = min(most, 2) if body is None or len(body) <= SMALL_BYTES else 1
    while (engine := other_decode(tried)) is not None and (left_s := deadline - now()) > 0:
        tried.append(engine)
        page.asks(engine)
        is_last = num_lost + 1 >= num_shares or other_decode(tried) is None
        timeout_s = left_s if is_last else left_s / num_shares
        try:
            answer = await engine.fetch(path, timeout_s=timeout_s, headers=headers, body=body)
        except NoWholeAnswer as error:
            reason = str(error)
            num_lost += not error.is_unsent
            if error.is_too_large or (error.is_late and is_last) or num_lost >= most:
                break  # The clock alone would not do: uvloop's timers may fire before the deadline.
        else:
            return answer
    raise RefusedRequest(unanswered(reason) if num_lost else no_engine("decode", reason))


def _for_its_model(
    router: Router, body: bytes | None
) -> tuple[Callable[[Sequence[Engine]], Engine | None], bytes | None]:
    """A function that chooses among the decode engines of the question's model (in a pool of one model, among all), and
    the body for them, with the model's own name in place of an alias.

    Raises:
        RefusedRequest: No engine serves it.
    """
    terms = router.services.model_terms
    if body is None or not (terms.are_several or terms.aliases):
        return router.services.roster.other_decode, body
    try:
        question = parse_body(body)
    except BadBody:
        question = parse_body(b"{}")  # An engine says what is wrong.
    name = question.model
    if not terms.are_several and name not in terms.aliases:
        return router.services.roster.other_decode, body
    candidates = terms.candidates(name)
    if candidates is None:
        raise RefusedRequest(terms.not_found(name))
    renamed = terms.name_for_engines(name)
    return candidates.other_decode, question.for_model(renamed).renamed() if renamed else body
