"""The scheduler half of a decode engine: which requests wait for a push, and how they end.

Scheduler thread only. The metaserver's replies come from another thread through a deque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.core.clock import deadline_after, remaining_ms
from pdcluster_connector.core.local_prefill import is_local
from pdcluster_connector.core.watermark import KvGroup, held_table, num_kept_back, wanted_spans
from pdcluster_connector.failures import LOCAL_PREFILL_TOKENS, LOCAL_PREFILLS, TransferFailure, count, log_failure
from pdcluster_connector.scheduler.first_steps import FirstSteps
from pdcluster_connector.steps import Cancel, ContentOrder, DecodeStep, Expect, PrefillEnded
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, EngineId, RequestId, TransferId
from pdcluster_protocol.metaserver import PrefillOutcome
from pdcluster_protocol.params import (
    ContentCheck,
    DecodeCall,
    DecodeParams,
    LocalPrefill,
    Receipt,
    Reservation,
    SideChannelAddress,
    parse_decode_params,
    to_wire,
)
from pdcluster_protocol.prompt_digest import digest_prompt
from pdcluster_protocol.secret import Secret

_REFUSED: Final = "refused"
_NO_ATTEMPT: Final = Attempt(0)


class Metaserver(Protocol):
    """The calls of the metaserver client that the scheduler half makes. Both return at once."""

    def post(self, request_id: RequestId, url: str, said: DecodeCall, *, deadline: float) -> None:
        """Sends ``said``. The client appends the outcome to the deque that it was made with.

        A request may have several calls open: one for each attempt that decode asked for.
        """

    def cancel(self, request_id: RequestId) -> None:
        """Cut the connections of this request that are still open."""


@dataclass(frozen=True, slots=True)
class DecodeEngine:
    """Facts of this engine from which its reservations and receipts are made, and its settings for pushes."""

    engine_id: EngineId
    tp_size: int
    groups: tuple[KvGroup, ...]
    side_channels: tuple[SideChannelAddress, ...]
    secret: Secret
    num_stages: int = 1
    dp_rank: int = 0
    page_tokens: tuple[int, ...] = ()
    """Tokens in a page of each group; empty: a block is one page."""
    transfer_protocol: str = ""
    content_check: ContentCheck = ContentCheck.OFF
    """For requests that want no receipt. For a request that wants one all content is compared."""
    min_push_tokens: int = 0
    """For requests that want no receipt. A request that wants one is pushed if it lacks more than the last token."""
    can_fail_running: bool = False
    """Whether vLLM fails a request that runs if one of its blocks is named to it, and drops the token of the step."""

    @property
    def num_kept_back(self) -> int:
        """How many tokens at the end of a prompt prefill does not compute: 0 or 1."""
        return num_kept_back(self.groups)


@dataclass(slots=True)
class _AwaitedRequest:
    """One request that asked for remote prefill."""

    token_ids: Sequence[int]
    deadline: float
    params: DecodeParams | None
    refusal: str = ""
    is_settled: bool = False
    """vLLM has allocated the request's blocks once: decode asks for no push of it any more."""
    is_over: bool = False
    """The request's wait for KV has ended, it never waits, or the workers were told to end its wait."""
    reservation: Reservation | None = None
    lost_attempt: Attempt = _NO_ATTEMPT
    """The newest attempt that the workers have given up."""
    has_failed: bool = False
    """A worker did not get its part. vLLM then computes the prompt or fails the request, whatever other workers got."""
    num_received_tokens: int = 0
    """Prompt tokens that all ranks have received whole."""
    num_missing: int = 0
    """Prompt tokens that decode lacked when vLLM asked last."""
    adapter: AdapterRequest | None = None
    media: Sequence[str] = ()

    @property
    def must_be_pushed(self) -> bool:
        """Whether ``min_push_tokens`` does not apply: the request wants a receipt, or it is refused.

        vLLM can be told of a refusal only while the request waits for a push.
        """
        return self.params is None or self.params.wants_receipt is True


class DecodeScheduler:
    """Reservations of one decode engine."""

    def __init__(
        self, engine: DecodeEngine, metaserver: Metaserver, outcomes: deque[tuple[RequestId, PrefillOutcome]]
    ) -> None:
        self._engine = engine
        self._metaserver = metaserver
        self._outcomes = outcomes
        self._requests: dict[RequestId, _AwaitedRequest] = {}
        self._transfers: dict[TransferId, RequestId] = {}
        self._expects: list[Expect] = []
        self._ended: list[PrefillEnded] = []
        self._cancels: list[Cancel] = []
        self.first_steps = FirstSteps(engine.groups[0], engine.num_stages, can_fail_running=engine.can_fail_running)
        """Of the requests with LoRA adapters."""
        self._posts: list[tuple[RequestId, str, DecodeCall, float]] = []
        self._num_local_tokens = 0
        """Missing tokens that this engine computes itself in the coming step."""

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
        """Takes a request in. A request with bad parameters fails later, with the reason that is kept here.

        ``adapter``: the LoRA adapter with which it decodes. ``media``: as in ``digest_prompt``.
        """
        try:
            parsed = parse_decode_params(params)
            self._engine.secret.check(parsed.token, parsed.transfer_id, parsed.attempt, parsed.deadline_ms)
        except ProtocolError as error:
            self._requests[request_id] = _AwaitedRequest(token_ids, now, None, str(error))
            return
        if parsed.transfer_id in self._transfers:
            # Prefill was told of another sequence's blocks: this is a second sequence of one request (n, best_of), or a
            # client made the parameters. Or vLLM's API layer repeats the request under a new id, after a load failure
            # or a timeout; vLLM then aborts the repeated request before it is scheduled.
            self._requests[request_id] = _AwaitedRequest(token_ids, now, None, _second_sequence(parsed.transfer_id))
            return
        self._transfers[parsed.transfer_id] = request_id
        deadline = deadline_after(parsed.deadline_ms, now=now)
        self._requests[request_id] = _AwaitedRequest(token_ids, deadline, parsed, adapter=adapter, media=media)

    def external_tokens(self, request_id: RequestId, computed_tokens: int) -> int:
        """How many prompt tokens after ``computed_tokens`` a push shall bring; 0: no push is wanted."""
        request = self._requests.get(request_id)
        if request is None or request.is_settled:
            return 0
        request.num_missing = missing = len(request.token_ids) - computed_tokens
        least = 0 if request.must_be_pushed else self._engine.min_push_tokens
        if is_local(missing, min_push_tokens=least, num_in_step=self._num_local_tokens):
            return 0
        return missing - self._engine.num_kept_back

    def reserve(
        self, request_id: RequestId, block_ids: Sequence[Sequence[int]], external_tokens: int, *, now: float
    ) -> None:
        """vLLM has allocated the request's blocks: its reservation goes out with this step.

        ``external_tokens``: what a push shall bring; 0: decode prefills the request itself. A refused request fails.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_settled:
            return
        request.is_settled = True
        if not external_tokens:
            self._prefill_locally(request_id, request, now)
            return
        if request.params is None:
            self._expect_failure(request_id, request, now)
            return
        reservation = self._reservation(request_id, request, request.params, block_ids, external_tokens, now)
        request.reservation = reservation
        expect = _expect(request_id, reservation, self._engine.groups, is_proof=request.params.wants_receipt is True)
        if request.adapter is not None:
            self.first_steps.expect(request_id, expect, reservation)
        self._expects.append(msgspec.structs.replace(expect, adapter=request.adapter))
        self._posts.append((request_id, request.params.metaserver, reservation, request.deadline))

    def step(self) -> DecodeStep:
        """The news of this step for the workers. Also posts the calls to the metaserver that waited for this step."""
        while self._outcomes:
            self._decide(*self._outcomes.popleft())
        step = DecodeStep(tuple(self._expects), tuple(self._ended), tuple(self._cancels), *self.first_steps.take())
        for request_id, url, said, deadline in self._posts:
            self._metaserver.post(request_id, url, said, deadline=deadline)
        self._expects, self._ended, self._cancels, self._posts = [], [], [], []
        self._num_local_tokens = 0
        return step

    def begin(self, request_ids: Iterable[RequestId]) -> None:
        """The coming step computes these requests, and the step before it did not."""
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                self.first_steps.begin(request_id, has_kv=not request.has_failed)

    def finish(self, request_id: RequestId) -> dict[str, object] | None:
        """vLLM has ended the request, in any state. Returns the receipt for its answer, if the router wants one."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self.first_steps.finish(request_id)
        if request.params is not None:
            del self._transfers[request.params.transfer_id]
        self._posts = [post for post in self._posts if post[0] != request_id]
        # A call that is cut after the end of the wait would tell the router that decode has given prefill up.
        if not request.is_over:
            self._abort(request_id, request)
        wants_receipt = request.params is not None and request.params.wants_receipt is True
        if not wants_receipt:
            return None
        # With a receipt each rank has compared the content before it reported the request as received.
        num_received = request.num_received_tokens
        return to_wire(Receipt(num_received, num_received > 0, self._engine.transfer_protocol))

    def received(self, ended: Iterable[RequestId], failed: Iterable[RequestId] = ()) -> None:
        """The workers have reported that the waits of ``ended`` are over, and that a rank got no KV for ``failed``.

        A rank may report its failure before the last rank's wait is over.
        """
        for request_id in failed:
            if request := self._requests.get(request_id):
                request.has_failed = True
        for request_id in ended:
            if request := self._requests.get(request_id):
                request.is_over = True
                if request.reservation is not None and not request.has_failed:
                    request.num_received_tokens = _num_wanted(request.reservation)

    def attempt_lost(self, request_id: RequestId, attempt: Attempt, reason: str, *, now: float) -> None:
        """A worker has given this attempt up: the router is asked for the next one, with the same reservation."""
        request = self._requests.get(request_id)
        if request is None or request.is_over or request.reservation is None or attempt <= request.lost_attempt:
            return
        assert request.params is not None
        request.lost_attempt = attempt
        again = msgspec.structs.replace(
            request.reservation,
            lost_attempt=attempt,
            lost_reason=reason,
            deadline_ms=remaining_ms(request.deadline, now=now),
        )
        self._posts.append((request_id, request.params.metaserver, again, request.deadline))

    def _prefill_locally(self, request_id: RequestId, request: _AwaitedRequest, now: float) -> None:
        """Decode computes this prompt itself, also after a preemption. The router is told; its answer is ignored."""
        request.is_over = True
        if request.num_missing > 1:
            self._num_local_tokens += request.num_missing
            count(LOCAL_PREFILLS)
            count(LOCAL_PREFILL_TOKENS, request.num_missing)
        if (params := request.params) is not None and request.token_ids:  # A prompt of embeddings has no ids.
            said = LocalPrefill(
                transfer_id=params.transfer_id,
                attempt=params.attempt,
                deadline_ms=remaining_ms(request.deadline, now=now),
                token=params.token,
                num_prompt_tokens=len(request.token_ids),
                num_local_tokens=max(1, request.num_missing),
            )
            self._posts.append((request_id, params.metaserver, said, request.deadline))

    def _abort(self, request_id: RequestId, request: _AwaitedRequest) -> None:
        self._metaserver.cancel(request_id)
        if request.is_settled:
            self._cancels.append(Cancel(request_id, "the request was aborted on decode"))

    def _decide(self, request_id: RequestId, outcome: PrefillOutcome) -> None:
        request = self._requests.get(request_id)
        if request is None or request.is_over:
            return
        if outcome.is_ok:
            self._ended.append(PrefillEnded(request_id, Attempt(outcome.attempt)))
            return
        request.is_over = True
        transfer_id = request.params.transfer_id if request.params else ""
        log_failure(TransferFailure.PREFILL_FAILED, request_id, transfer_id, reason=outcome.reason)
        self._cancels.append(Cancel(request_id, f"prefill failed: {outcome.reason}"))

    def _expect_failure(self, request_id: RequestId, request: _AwaitedRequest, now: float) -> None:
        """Fails the request in vLLM's own way: the request first waits for KV, then vLLM hears that none comes."""
        log_failure(TransferFailure.TRANSFER_REFUSED, request_id, reason=request.refusal)
        transfer = TransferId(f"{_REFUSED}:{request_id}")
        left = remaining_ms(request.deadline, now=now)
        self._expects.append(Expect(request_id, transfer, left, ()))
        self._cancels.append(Cancel(request_id, request.refusal))
        request.is_over = True

    def _reservation(
        self,
        request_id: RequestId,
        request: _AwaitedRequest,
        params: DecodeParams,
        block_ids: Sequence[Sequence[int]],
        external_tokens: int,
        now: float,
    ) -> Reservation:
        """The reservation, made from facts of this engine, the request and the router's parameters."""
        first, groups = self._engine.side_channels[0], self._engine.groups
        tokens = request.token_ids[: len(request.token_ids) - self._engine.num_kept_back]
        return Reservation(
            request_id=request_id,
            remote_block_ids=tuple(map(tuple, held_table(groups, len(tokens), block_ids))),
            remote_block_size=groups[0].block_tokens,
            remote_block_sizes=tuple(0 if group.is_state else group.block_tokens for group in groups),
            remote_page_sizes=self._engine.page_tokens,
            remote_engine_id=self._engine.engine_id,
            remote_host=first.host,
            remote_port=first.port,
            remote_tp_size=self._engine.tp_size,
            remote_pp_size=self._engine.num_stages,
            remote_dp_rank=self._engine.dp_rank,
            remote_cached_tokens=len(tokens) - external_tokens,
            transfer_id=params.transfer_id,
            attempt=params.attempt,
            deadline_ms=remaining_ms(request.deadline, now=now),
            token=params.token,
            remote_boot_id=first.boot_id,
            remote_side_channels=self._engine.side_channels,
            num_prompt_tokens=len(tokens),
            prompt_digest=digest_prompt(tokens, request.media),
            content_check=ContentCheck.FULL if params.wants_receipt else self._engine.content_check,
        )


def _second_sequence(transfer_id: TransferId) -> str:
    return (
        f"transfer {transfer_id} has a sequence on this decode engine already, and a transfer fills the blocks of one: "
        "ask for one choice (n, best_of, use_beam_search), or without prefill"
    )


def _num_wanted(reservation: Reservation) -> int:
    """The number of prompt tokens that decode asks prefill for."""
    return reservation.num_prompt_tokens - reservation.remote_cached_tokens


def _expect(request_id: RequestId, reservation: Reservation, groups: Sequence[KvGroup], *, is_proof: bool) -> Expect:
    first, end = reservation.remote_cached_tokens, reservation.num_prompt_tokens
    spans = tuple(
        wanted_spans(group, first, end, blocks)
        for group, blocks in zip(groups, reservation.remote_block_ids, strict=True)
    )
    check = reservation.content_check
    content = None if check is ContentCheck.OFF else ContentOrder(spans, reservation.remote_block_ids, check)
    return Expect(request_id, reservation.transfer_id, reservation.deadline_ms, spans, content, is_proof)
