"""The metaserver's answer: how prefill ended.

Decode POSTs its reservation and the connection stays open until prefill has ended. Only a 200 with the outcome ``ok``
is a success. Every other answer, a cut connection and a passed deadline are failures.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from pdcluster_protocol.bounds import CountOrNone
from pdcluster_protocol.errors import NO_JSON, ProtocolError
from pdcluster_protocol.ids import Attempt

METASERVER_PATH: Final = "/v1/metaserver"
SEAL_HEADER: Final = "x-pdcluster-seal"
"""Header of decode's call: ``Secret.seal_call`` of the body's bytes."""


class Action(Enum):
    """Decode's action on a request whose prefill failed."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class PrefillOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How prefill ended. If ``status`` is not ``ok``, ``reason`` says why and ``action`` what decode shall do."""

    status: str
    reason: str = ""
    action: Action = Action.FAIL
    attempt: CountOrNone = 0
    """The attempt that ended well; 0: not said. Ranks of that attempt without a grant will not ask for one
    any more."""

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def succeeded(attempt: Attempt) -> PrefillOutcome:
    """The prefill engine of ``attempt`` has computed the prompt. Its bytes may still be on their way."""
    return PrefillOutcome("ok", attempt=attempt)


def failed(reason: str, action: Action = Action.FAIL) -> PrefillOutcome:
    """Prefill did not fill the blocks, for ``reason``."""
    return PrefillOutcome("failed", reason, action)


def encode_outcome(outcome: PrefillOutcome) -> bytes:
    """The JSON body of the metaserver's reply."""
    return msgspec.json.encode(outcome)


def decode_outcome(body: bytes) -> PrefillOutcome:
    """The outcome in the metaserver's reply.

    Raises:
        ProtocolError: The body is not an outcome.
    """
    try:
        outcome = msgspec.json.decode(body, type=PrefillOutcome)
    except NO_JSON as error:
        raise ProtocolError(f"metaserver's reply is not an outcome: {error}") from error
    if outcome.status not in ("ok", "failed"):
        raise ProtocolError(f"metaserver's reply has status {outcome.status!r}, not 'ok' or 'failed'")
    return outcome
