"""Tells the router in an answer that this engine has ended the request, and has not given it up.

Source of truth: vLLM 0.23 to 0.33 ``v1/core/sched/scheduler.py`` (``_free_request``) and ``v1/request.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdcluster_protocol.whole import IS_WHOLE, WANTS_WHOLE

if TYPE_CHECKING:  # no engine fails because this has moved
    from vllm.v1.request import Request

_ENDED: Final = frozenset(("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"))
"""The names of ``RequestStatus`` for a request that the model, or its own limits, have ended."""


def with_whole(request: Request, said: dict[str, object] | None) -> dict[str, object] | None:
    """Adds the router's word to ``said``, the answer's ``kv_transfer_params``, if the request is whole. Scheduler
    thread, when the request ends."""
    params = request.kv_transfer_params
    if not isinstance(params, dict) or params.get(WANTS_WHOLE) is not True or request.status.name not in _ENDED:
        return said
    return {**(said or {}), IS_WHOLE: True}
