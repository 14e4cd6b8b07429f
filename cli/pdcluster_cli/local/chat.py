"""Sends the requests of ``pdcluster local``: for the model's name, a proof, and a streamed answer. Prints nothing.

If our environment has vLLM's own ``VLLM_API_KEY``, the engines ask for this key, and so we send it.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

import msgspec

from pdcluster_cli.processes.engines import LOOPBACK
from pdcluster_protocol.launch import ENGINE_KEY_VARIABLE
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.verify import VERIFY_PATH, VerifyAnswer, VerifyOrder

_PASS_S: Final = 60
_PROOF_S: Final = 120.0
"""Seconds that the router may take for the proof: the first request of fresh engines is slow."""


class ChatError(Exception):
    """The endpoint answered with an error, or its answer broke off. The message says which."""


class QuestionRefused(ChatError):
    """The engines do not take this question: it is too long for the model, or the model has no chat template."""


def stream_answer(port: int, model: str, question: str, *, max_tokens: int, timeout_s: float) -> Iterator[str]:
    """The pieces of the answer as they arrive.

    Raises:
        QuestionRefused: The status is 400.
        ChatError: Another status than 200, an error event, or a stream without its end.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    headers = {"content-type": "application/json", **_authorization()}
    try:
        with _asked(port, "POST /v1/chat/completions", json.dumps(body), headers, timeout_s) as response:
            _require_ok("POST /v1/chat/completions", response, refusal=QuestionRefused)
            yield from _pieces(response)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the answer broke off: {error!r}") from error


def served_model(port: int, *, timeout_s: float) -> str:
    """The name under which the endpoint serves its model.

    Raises:
        ChatError: The endpoint names no model, or does not answer.
    """
    try:
        with _asked(port, "GET /v1/models", None, _authorization(), timeout_s) as response:
            _require_ok("GET /v1/models", response)
            return str(json.loads(response.read())["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise ChatError(f"GET /v1/models names no model: {error!r}") from error


def prove_transfer(port: int, secret: Secret) -> str:
    """One line of proof, from a request whose content both engines compare. ``port``: the router's internal one.

    Raises:
        ChatError: Nothing was proven. The message says why.
    """
    body = msgspec.json.encode(VerifyOrder(timeout_s=_PROOF_S))
    headers = {"authorization": f"Bearer {secret.mint_pass(body, int(time.time()) + _PASS_S)}"}
    try:
        with _asked(port, f"POST {VERIFY_PATH}", body, headers, _PROOF_S + 5) as response:
            raw = response.read()
            if response.status != http.HTTPStatus.OK:
                raise ChatError(f"the first request was not verified: {json.loads(raw)['error']['message']}")
            told = msgspec.json.decode(raw, type=VerifyAnswer)
    except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError, LookupError) as error:
        raise ChatError(f"the first request was not verified: {error!r}") from error
    return f"{told.pushed_tokens:,} tokens by {told.transfer_protocol}, their content compared on both engines"


def _authorization() -> dict[str, str]:
    key = os.environ.get(ENGINE_KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def _asked(
    port: int, call: str, body: str | bytes | None, headers: Mapping[str, str], timeout_s: float
) -> Iterator[http.client.HTTPResponse]:
    """The answer to one request. ``call``: method and path."""
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)) as connection:
        method, path = call.split()
        connection.request(method, path, body, headers)
        yield connection.getresponse()


def _require_ok(call: str, response: http.client.HTTPResponse, refusal: type[ChatError] = ChatError) -> None:
    """``refusal``: raised for a 400."""
    status = response.status
    if status == http.HTTPStatus.OK:
        return
    is_key_wrong = status == http.HTTPStatus.UNAUTHORIZED
    cure = f": engines ask for a key: give it to all by {ENGINE_KEY_VARIABLE}, not by --api-key" if is_key_wrong else ""
    kind = refusal if status == http.HTTPStatus.BAD_REQUEST else ChatError
    raise kind(f"{call} was answered {status}{cure}: {response.read().decode(errors='replace')}")


def _pieces(lines: http.client.HTTPResponse) -> Iterator[str]:
    for line in lines:
        event = line.strip().removeprefix(b"data:").strip()
        if event == b"[DONE]":
            return
        if event and line.startswith(b"data:"):
            yield _piece_of(json.loads(event))
    raise ChatError("the answer ended without its last event")


def _piece_of(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ChatError(json.dumps(event["error"]))
    choices = event.get("choices") or [{}]
    return str(choices[0].get("delta", {}).get("content") or "")
