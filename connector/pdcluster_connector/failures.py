"""Logs and counts failures: each has one line, with the same keys everywhere. Keeps all other counts too.

``docs/operations.md`` says for each kind what to do about it. No token or prompt is logged. An address is logged only
in the message of a transport that cannot start there.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from enum import Enum
from typing import Final

from pdcluster_protocol.ids import Attempt, RequestId, TransferId

_LOG: Final = logging.getLogger("vllm.pdcluster.failure")

PUSHED_BYTES: Final = "pushed_bytes"
PUSHES_DONE: Final = "pushes_done"
RECEIVES_DONE: Final = "receives_done"
LOCAL_PREFILLS: Final = "local_prefills"
LOCAL_PREFILL_TOKENS: Final = "local_prefill_tokens"

_counts_lock = threading.Lock()
_counts: Counter[str] = Counter()
"""The counts of this process since they were last taken: failures by kind, bytes and transfers."""


class TransferFailure(Enum):
    """Kinds of failures. On prefill: the first four; on decode: the others."""

    PUSH_FAILED = "push_failed"
    """A push ended before its last byte was acknowledged, or its content could not be summed up."""
    SESSION_CLOSED = "session_closed"
    """A lane has closed its own transport session: a write ended badly, or not at all."""
    RESERVATION_REFUSED = "reservation_refused"
    """A request's reservation cannot be served here: the prompt is computed but not pushed."""
    LANE_FAILED = "lane_failed"
    """A decode rank cannot be reached, or refused the handshake."""
    ATTEMPT_LOST = "attempt_lost"
    """A decode rank has given an attempt up; the router decides what follows."""
    CONTENT_DIFFERS = "content_differs"
    """Decode's content differs from what was pushed: it is pushed once more, or the attempt is lost."""
    RECEIVE_FAILED = "receive_failed"
    """A request's KV did not come; vLLM recomputes it or fails the request, as configured."""
    ADAPTER_CHANGED = "adapter_changed"
    """A request's first step read other files of its LoRA adapter than its KV was computed with; vLLM fails it."""
    ADAPTER_MIXED = "adapter_mixed"
    """The same, and vLLM cannot fail it: its answer is of both."""
    SESSION_CUT = "session_cut"
    """A decode rank has closed the session of a prefill engine that could not say that it had stopped writing."""
    SESSION_REFUSED = "session_refused"
    """A decode rank could not open a session for a prefill engine, or not in time."""
    TRANSFER_REFUSED = "transfer_refused"
    """The router's parameters cannot be served by this decode engine."""
    PREFILL_FAILED = "prefill_failed"
    """The router said that prefill failed for good."""


def log_failure(
    kind: TransferFailure,
    request_id: RequestId | str = "",
    transfer_id: TransferId | str = "",
    attempt: Attempt | int = 0,
    reason: str = "",
) -> None:
    """Count and log one failure. Any thread; never waits for anything but the log."""
    count(kind.value)
    _LOG.warning(
        "failure kind=%s request_id=%s transfer_id=%s attempt=%d reason=%r",
        kind.value,
        request_id,
        transfer_id,
        attempt,
        reason,
    )


def count(name: str, amount: int = 1) -> None:
    """Add to one count. Any thread; the lock is held for one addition."""
    with _counts_lock:
        _counts[name] += amount


def take_counts() -> dict[str, int]:
    """The counts since the last call. Mostly there are none, and the lock is not taken. Any thread."""
    if not _counts:
        return {}
    with _counts_lock:
        taken = dict(_counts)
        _counts.clear()
    return taken
