"""Asks an OpenAI endpoint one streamed chat question. Knows the wire format, prints nothing.

Engines that vLLM's own ``VLLM_API_KEY`` makes ask for a key have it from our environment: so we show it too.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from typing import Any

from pdcluster_cli.engines import LOOPBACK
from pdcluster_protocol.launch import ENGINE_KEY_VARIABLE


class ChatError(Exception):
    """The endpoint answered with an error, or broke off. The message is the endpoint's own."""


def stream_answer(port: int, model: str, question: str, *, max_tokens: int, timeout_s: float) -> Iterator[str]:
    """The pieces of the answer as they arrive.

    Raises:
        ChatError: A status other than 200, an error event, or a stream without its end.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json", **_authorization()}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ChatError(_refusal("POST /v1/chat/completions", response.status, response.read()))
        yield from _pieces(response)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"the answer broke off: {error!r}") from error
    finally:
        connection.close()


def served_model(port: int, *, timeout_s: float) -> str:
    """The name under which the endpoint serves its model.

    Raises:
        ChatError: It lists none.
    """
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
    try:
        connection.request("GET", "/v1/models", headers=_authorization())
        response = connection.getresponse()
        text = response.read()
        if response.status != http.HTTPStatus.OK:
            raise ChatError(_refusal("GET /v1/models", response.status, text))
        return str(json.loads(text)["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise ChatError(f"GET /v1/models names no model: {error!r}") from error
    finally:
        connection.close()


def _authorization() -> dict[str, str]:
    key = os.environ.get(ENGINE_KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def _refusal(call: str, status: int, text: bytes) -> str:
    is_key_wrong = status == http.HTTPStatus.UNAUTHORIZED
    cure = f": engines ask for a key: give it to all by {ENGINE_KEY_VARIABLE}, not by --api-key" if is_key_wrong else ""
    return f"{call} was answered {status}{cure}: {text.decode(errors='replace')}"


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
