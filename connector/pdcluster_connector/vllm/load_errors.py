"""How vLLM before 0.30 is told that KV does not come: by the blocks of the request, not by the request's id.

    scheduler half                    worker half                      scheduler half
    PushedBlocks.reserve  --step-->   FailedBlocks.begin_step
                                      FailedBlocks.ended, .take  -->   vLLM fails the request
                                                                 -->   PushedBlocks.failed: which request it was

Source of truth: vLLM 0.23 ``v1/core/sched/scheduler.py``, ``_handle_invalid_blocks``. vLLM looks the blocks up in the
tables of all requests that wait for KV or run. So only blocks that a push fills may be named: no other request holds
these yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.ids import RequestId

Blocks: TypeAlias = tuple[int, ...]


class PushedBlocks:
    """The scheduler half of a decode engine: which blocks each request waits for. Scheduler thread only."""

    def __init__(self, block_tokens: int) -> None:
        """``block_tokens``: of the one KV group."""
        self._block_tokens = block_tokens
        self._waiting: dict[RequestId, Blocks] = {}
        self._new: dict[RequestId, Blocks] = {}

    def reserve(self, request_id: RequestId, table: Sequence[int], first_token: int) -> None:
        """A push shall fill the blocks of ``table`` from the block of ``first_token`` on."""
        blocks = tuple(filter(None, table[first_token // self._block_tokens :]))  # without the null block
        self._waiting[request_id] = self._new[request_id] = blocks

    def take_new(self) -> dict[RequestId, Blocks]:
        """The blocks of the reservations since the last call. The workers get them with this step."""
        new, self._new = self._new, {}
        return new

    def failed(self, invalid: Collection[int]) -> set[RequestId]:
        """The requests that wait for a block of ``invalid``, which the workers have named."""
        return {name for name, blocks in self._waiting.items() if not set(blocks).isdisjoint(invalid)}

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """All workers have reported these requests."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)


class FailedBlocks:
    """The worker half of a decode engine: the blocks of failed waits, for vLLM. Forward thread only."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Blocks] = {}
        self._failed: set[int] = set()

    def begin_step(self, new: Mapping[RequestId, Blocks]) -> None:
        """This worker knows the ``new`` reservations of the scheduler half."""
        self._waiting.update(new)

    def ended(self, ended: Iterable[RequestId], failed: Collection[RequestId]) -> None:
        """The waits of the requests ``ended`` are over; those of ``failed`` brought no KV."""
        for request_id in ended:
            blocks = self._waiting.pop(request_id, ())
            if request_id in failed:
                self._failed.update(blocks)

    def take(self) -> set[int]:
        """The blocks of waits that have failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed


def can_fail_running(groups: Sequence[KvGroup], *, recomputes: bool) -> bool:
    """Whether vLLM fails a request that runs once one of its blocks is named, and drops the token of that step.

    With several groups its engine ends. If it ``recomputes``, the token of the next step, which is scheduled already,
    stays in the answer (0.32 ``v1/core/sched/scheduler.py``, ``_handle_invalid_blocks``).
    """
    return len(groups) == 1 and not groups[0].is_state and not recomputes


def require_one_group(version: str, groups: Sequence[KvGroup], *, recomputes: bool) -> None:
    """vLLM can be told by blocks that KV did not come. ``recomputes``: vLLM then computes the prompt.

    Raises:
        ConfigError: There are several groups, whose blocks have the same numbers. Or there is state, which no block
            names. Or vLLM would take the tokens before a window for computed.
    """
    if any(group.is_state for group in groups):
        raise ConfigError(
            f"the model has recurrent state, of which vLLM {version} cannot be told that it did not come: use vLLM "
            "0.30 or newer"
        )
    one_group = "start both engines with --disable-hybrid-kv-cache-manager"
    if len(groups) > 1:
        raise ConfigError(
            f"the model has {len(groups)} KV groups, of which vLLM {version} cannot be told that one did not come: "
            f"use vLLM 0.30 or newer, or {one_group}"
        )
    if recomputes and groups[0].is_windowed:
        raise ConfigError(
            f"kv_load_failure_policy is recompute, but vLLM {version} takes what lies before a sliding window for "
            f"computed: choose fail, use vLLM 0.30 or newer, or {one_group}"
        )
