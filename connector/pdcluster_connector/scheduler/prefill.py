"""The scheduler half of a prefill engine: which blocks of which request leave at this step.

Scheduler thread only. No I/O but a log line for each reservation that is refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.clock import deadline_after, remaining_ms
from pdcluster_connector.core.ranges import TokenSpan
from pdcluster_connector.core.sending import PushKey
from pdcluster_connector.core.tp_mapping import related_ranks
from pdcluster_connector.core.watermark import (
    GroupPair,
    KvGroup,
    Prompt,
    held_table,
    num_blocks,
    slice_of,
    wanted_spans,
)
from pdcluster_connector.failures import TransferFailure, log_failure
from pdcluster_connector.settings import PushTiming
from pdcluster_connector.steps import ContentOrder, PrefillStep, PushSlice, PushTarget
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import BootId, RequestId
from pdcluster_protocol.params import (
    ContentCheck,
    Reservation,
    check_seal,
    parse_reservation,
)
from pdcluster_protocol.prefill_answer import PrefillAnswer
from pdcluster_protocol.prompt_digest import digest_prompt
from pdcluster_protocol.secret import Secret

BlockTable: TypeAlias = tuple[Sequence[int], ...]

_MAX_REMEMBERED: Final = 16384
"""The most ended pushes that are remembered: those of some minutes on the largest engine, in 4 MB."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request that this step computes. ``computed_tokens``: how many of its tokens are computed after this step."""

    request_id: RequestId
    computed_tokens: int


@dataclass(slots=True)
class _OutgoingTransfer:
    """One request on its way to a decode engine."""

    reservation: Reservation
    deadline: float
    prompt: Prompt
    watermarks: list[int]
    """Of each KV group, in tokens."""
    adapter: AdapterRequest | None = None
    is_announced: bool = False
    is_whole: bool = False

    @property
    def key(self) -> PushKey:
        return PushKey(self.reservation.transfer_id, self.reservation.attempt)


class _UsedKeys:
    """The pushes that have begun here. A second push of the same attempt would write other KV into the same blocks.

    begin --> lives --ended--> its lanes may still know it --freed--> remembered until its deadline --> forgotten
    """

    def __init__(self) -> None:
        self._until: dict[PushKey, float] = {}
        """Monotonic seconds; infinite while lanes may know the push."""
        self._freed: deque[PushKey] = deque()

    def has(self, key: PushKey, *, now: float) -> bool:
        """Whether a push of ``key`` is remembered as begun."""
        while self._freed and (len(self._freed) > _MAX_REMEMBERED or self._until[self._freed[0]] <= now):
            del self._until[self._freed.popleft()]
        return key in self._until

    def begin(self, key: PushKey) -> None:
        """A push of ``key`` begins. No push of ``key`` is remembered yet."""
        self._until[key] = math.inf

    def freed(self, key: PushKey, *, deadline: float) -> None:
        """No lane knows ``key`` any more. The key is remembered until ``deadline``, only to refuse a second push."""
        self._until[key] = deadline
        self._freed.append(key)


@dataclass(frozen=True, slots=True)
class PrefillEngine:
    """The facts that decide whether this engine can push for a reservation. ``kv_heads``: as in the fingerprint."""

    tp_size: int
    kv_heads: tuple[int, ...]
    groups: tuple[KvGroup, ...]

    def require_spread_over(self, decode_tp: int) -> None:
        """The KV of the layers can be spread over a decode engine of ``decode_tp`` ranks.

        Raises:
            ValueError: It cannot.
        """
        has_state = any(group.is_state for group in self.groups)
        related_ranks(self.tp_size, decode_tp, self.kv_heads, has_state=has_state)


class PrefillScheduler:
    """Decides which block leaves when, for every request of one prefill engine."""

    def __init__(self, engine: PrefillEngine, timing: PushTiming, secret: Secret, life: BootId) -> None:
        """``life``: boot id of this scheduler. An engine (in vLLM, each data-parallel rank) has one scheduler."""
        self._secret = secret
        self._life = life
        self._engine = engine
        self._is_serial = timing is PushTiming.SERIAL
        self._transfers: dict[RequestId, _OutgoingTransfer] = {}
        self._refusals: dict[RequestId, str] = {}
        self._keys = _UsedKeys()
        self._unfreed: dict[RequestId, _OutgoingTransfer] = {}
        """Ended requests whose blocks workers may still read."""

    def add(
        self,
        request_id: RequestId,
        params: object,
        token_ids: Sequence[int],
        adapter: AdapterRequest | None = None,
        media: Sequence[str] = (),
        *,
        now: float,
    ) -> None:
        """Takes a request in. A request that cannot be pushed is still computed, and its answer says why not.

        ``adapter``: the LoRA adapter with which it is computed. ``media``: as in ``digest_prompt``.
        """
        try:
            digest = digest_prompt(token_ids, media)
            self._transfers[request_id] = self._accept(params, len(token_ids), digest, adapter, now)
        except ProtocolError as error:
            log_failure(TransferFailure.RESERVATION_REFUSED, request_id, reason=str(error))
            self._refusals[request_id] = str(error)

    def step(
        self,
        scheduled: Iterable[Scheduled],
        preempted: Iterable[RequestId],
        block_table_of: Callable[[RequestId], BlockTable],
        *,
        now: float,
    ) -> PrefillStep:
        """The slices that this step completes, and those of the ``preempted`` requests that have a push."""
        slices = []
        for item in scheduled:
            transfer = self._transfers.get(item.request_id)
            if transfer is not None and not transfer.is_whole:
                part = self._next_slice(item, transfer, block_table_of, now)
                slices.extend([part] if part else [])
        lost = tuple(request_id for request_id in preempted if request_id in self._transfers)
        return PrefillStep(self._life, tuple(slices), lost)

    def finish(self, request_id: RequestId) -> tuple[bool, dict[str, object] | None]:
        """Whether workers may still read the request's blocks, and what its answer tells the router."""
        if reason := self._refusals.pop(request_id, ""):
            return False, PrefillAnswer(reason).to_wire()
        transfer = self._transfers.pop(request_id, None)
        if transfer is None:
            return False, None
        self._unfreed[request_id] = transfer
        if not transfer.is_announced:
            self.freed([request_id])
        return transfer.is_announced, None

    def freed(self, request_ids: Iterable[RequestId]) -> None:
        """No worker reads the blocks of these requests any more, or knows their pushes."""
        for request_id in request_ids:
            if transfer := self._unfreed.pop(request_id, None):
                self._keys.freed(transfer.key, deadline=transfer.deadline)

    def _accept(
        self, params: object, num_tokens: int, digest: str, adapter: AdapterRequest | None, now: float
    ) -> _OutgoingTransfer:
        reservation = parse_reservation(params)
        self._secret.check(reservation.token, reservation.transfer_id, reservation.attempt, reservation.deadline_ms)
        check_seal(reservation, self._secret)
        self._require_pushable(reservation, now)
        _require_same_prompt(reservation, num_tokens, digest)
        prompt = self._prompt(reservation)
        for pair, blocks in zip(prompt.groups, reservation.remote_block_ids, strict=True):
            if len(blocks) < (needed := num_blocks(pair.decode, prompt.num_tokens)):
                raise ProtocolError(
                    f"decode engine {reservation.remote_engine_id} reserved {len(blocks)} blocks, and this prompt "
                    f"needs {needed}: run the same pdcluster on both engines"
                )
        deadline = deadline_after(reservation.deadline_ms, now=now)
        transfer = _OutgoingTransfer(reservation, deadline, prompt, [0] * len(prompt.groups), adapter)
        self._keys.begin(transfer.key)
        return transfer

    def _prompt(self, reservation: Reservation) -> Prompt:
        ours, sizes = self._engine.groups, reservation.block_sizes
        if len(ours) != len(sizes):
            raise ProtocolError(
                f"decode engine {reservation.remote_engine_id} has {len(sizes)} KV groups, ours is {len(ours)}: "
                "serve the same model, with the same --disable-hybrid-kv-cache-manager and --speculative-config"
            )
        theirs = (KvGroup(size or 1, is_state=size == 0) for size in sizes)
        try:
            pairs = tuple(GroupPair(prefill, decode) for prefill, decode in zip(ours, theirs, strict=True))
            return Prompt(reservation.num_prompt_tokens, reservation.remote_cached_tokens, pairs)
        except ValueError as error:
            raise ProtocolError(
                f"reservation of decode engine {reservation.remote_engine_id}: {error}: start both with the same "
                "--block-size, or with one that divides the other"
            ) from error

    def _require_pushable(self, reservation: Reservation, now: float) -> None:
        key = PushKey(reservation.transfer_id, reservation.attempt)
        if self._keys.has(key, now=now):
            raise ProtocolError(
                f"transfer {key.transfer_id} attempt {key.attempt} has a sequence here already, and an attempt pushes "
                "one: ask for one choice (n, best_of, use_beam_search)"
            )
        try:
            self._engine.require_spread_over(reservation.remote_tp_size)
        except ValueError as error:
            raise ProtocolError(
                f"decode engine {reservation.remote_engine_id} has TP {reservation.remote_tp_size}, prefill has TP "
                f"{self._engine.tp_size}: {error}"
            ) from error

    def _next_slice(
        self,
        item: Scheduled,
        transfer: _OutgoingTransfer,
        block_table_of: Callable[[RequestId], BlockTable],
        now: float,
    ) -> PushSlice | None:
        """The slice of this step; moves the watermarks. None: the step completes nothing. The first and the last slice
        are sent even without blocks."""
        is_last = item.computed_tokens >= transfer.prompt.num_tokens
        # Serial mode holds everything back until the prompt is whole.
        computed = item.computed_tokens if is_last or not self._is_serial else 0
        prompt = transfer.prompt
        spans = [prompt.next_span(number, mark, computed) for number, mark in enumerate(transfer.watermarks)]
        if not is_last and transfer.is_announced and all(start == stop for start, stop in spans):
            return None
        transfer.watermarks = [stop for _, stop in spans]
        transfer.is_announced, transfer.is_whole = True, is_last
        held = held_table(
            self._engine.groups, min(item.computed_tokens, prompt.num_tokens), block_table_of(item.request_id)
        )
        return _slice(item.request_id, transfer, spans, held, now)


def _slice(
    request_id: RequestId,
    transfer: _OutgoingTransfer,
    spans: Sequence[TokenSpan],
    held: Sequence[Sequence[int]],
    now: float,
) -> PushSlice:
    """A slice of ``spans``, with the blocks of both engines. ``held``: our blocks of the tokens computed so far."""
    reservation, prompt, is_last = transfer.reservation, transfer.prompt, transfer.is_whole
    return PushSlice(
        request_id,
        reservation.transfer_id,
        reservation.attempt,
        reservation.token,
        _target(reservation, transfer.deadline, now),
        tuple(map(slice_of, prompt.groups, spans, held, reservation.remote_block_ids)),
        prompt.num_tokens,
        is_last,
        _content(transfer, held) if is_last else None,
        transfer.adapter,
    )


def _content(transfer: _OutgoingTransfer, tables: Sequence[Sequence[int]]) -> ContentOrder | None:
    """The positions that decode works out from its own block table, and the block tables of both engines, without the
    push's plan. None: nothing is compared."""
    check = transfer.reservation.content_check
    if check is ContentCheck.OFF:
        return None
    prompt, blocks = transfer.prompt, transfer.reservation.remote_block_ids
    spans = tuple(
        wanted_spans(pair.decode, prompt.cached_tokens, prompt.num_tokens, table)
        for pair, table in zip(prompt.groups, blocks, strict=True)
    )
    return ContentOrder(spans, tuple(map(tuple, tables)), check, blocks)


def _target(reservation: Reservation, deadline: float, now: float) -> PushTarget:
    return PushTarget(
        reservation.remote_engine_id,
        reservation.remote_tp_size,
        reservation.remote_side_channels,
        remaining_ms(deadline, now=now),
        reservation.block_sizes,
        reservation.page_sizes,
    )


def _require_same_prompt(reservation: Reservation, num_tokens: int, digest: str) -> None:
    if (num_tokens, digest) != (reservation.num_prompt_tokens, reservation.prompt_digest):
        raise ProtocolError(
            f"decode engine {reservation.remote_engine_id} reserved for {reservation.num_prompt_tokens} prompt tokens, "
            f"this one has {num_tokens} or other tokens or images: serve the same tokenizer, chat template and --model "
            "name, and images whose URLs bring both engines the same bytes"
        )
