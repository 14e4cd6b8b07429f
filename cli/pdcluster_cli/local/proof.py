"""Asks the router to prove that the pool hands KV over: one request whose content both engines compare."""

from __future__ import annotations

import http.client
import json
import time
from typing import Final

import msgspec

from pdcluster_cli.engines import LOOPBACK
from pdcluster_cli.local.chat import ChatError
from pdcluster_protocol.secret import Secret
from pdcluster_protocol.verify import VERIFY_PATH, VerifyAnswer, VerifyOrder

_PASS_S: Final = 60
_TIMEOUT_S: Final = 120.0
"""The most that a router takes for it: the engines are fresh, and their first request is slow."""


def prove_transfer(port: int, secret: Secret) -> str:
    """What was proven, in a line for people. ``port``: the router's internal one.

    Raises:
        ChatError: It was not, and why.
    """
    body = msgspec.json.encode(VerifyOrder(timeout_s=_TIMEOUT_S))
    headers = {"authorization": f"Bearer {secret.mint_pass(body, int(time.time()) + _PASS_S)}"}
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=_TIMEOUT_S + 5)
    try:
        connection.request("POST", VERIFY_PATH, body, headers)
        response = connection.getresponse()
        raw = response.read()
        if response.status != http.HTTPStatus.OK:
            raise ChatError(f"the first request was not verified: {json.loads(raw)['error']['message']}")
        told = msgspec.json.decode(raw, type=VerifyAnswer)
        return f"{told.pushed_tokens:,} tokens by {told.transfer_protocol}, their content compared on both engines"
    except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError, LookupError) as error:
        raise ChatError(f"the first request was not verified: {error!r}") from error
    finally:
        connection.close()
