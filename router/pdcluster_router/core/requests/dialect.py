"""How a router and its engines speak: what engines are told, how they name a request, and what their silence means.

One object, chosen once at start. This file has the interface of dialects, and pdcluster's own dialect;
``vllm_ascend.py`` has the one for engines that run vllm-ascend's own connector. Other files decide which engine is
asked, how often and for how long.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final, Protocol, TypeAlias

import msgspec
import orjson

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import NO_ATTEMPT, Attempt, TransferId
from pdcluster_protocol.params import (
    DecodeCall,
    DecodeParams,
    LocalPrefill,
    Reservation,
    for_attempt,
    parse_call,
    reservation_in,
)
from pdcluster_protocol.secret import Secret
from pdcluster_router.core.apis.rewrite import Bytes
from pdcluster_router.core.apis.sse import GAVE_UP
from pdcluster_router.core.engines.breaker import Blame
from pdcluster_router.core.requests.pairing import FIRST_ATTEMPT, Event, Retries

BAD_REQUEST: Final = 400
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404


class LayerwiseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation of vllm-ascend's decode engine: the fields that the router reads, and the whole body as bytes."""

    transfer_id: TransferId
    posted: bytes
    """The bytes for prefill. A repeated call has the same bytes."""
    num_prompt_tokens: int
    remote_cached_tokens: int
    attempt: Attempt = FIRST_ATTEMPT
    lost_attempt: Attempt = NO_ATTEMPT
    lost_reason: str = ""
    deadline_ms: int = 0


Posted: TypeAlias = Reservation | LayerwiseCall
"""A reservation of decode, as it is posted to the metaserver."""


class BadCall(ProtocolError):
    """A call to the metaserver is refused with ``status`` at once. ``transfer_id`` and ``attempt``: those that the call
    named, as far as they were read."""

    def __init__(self, status: int, reason: str, transfer_id: str = "", attempt: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        self.transfer_id = transfer_id
        self.attempt = attempt


class Dialect(Protocol):
    """One way to speak to engines."""

    given_up: Mapping[bytes, str]
    """Bytes that mark an answer as unfinished by decode, each with the client's message."""
    prefill_goes_on: bool
    """Whether a call to prefill may still run for the time of one attempt when its request has ended or goes on
    elsewhere; False: it is aborted."""
    no_proof: str
    """Why a push cannot be verified; empty where it can."""
    gives_back_unseen: str
    """The reason to refuse an API whose answers do not show that an engine gave the request up; empty: such APIs are
    served."""

    def client_line(self, request_id: bytes) -> bytes:
        """The header line that names the client's request to engines; empty: engines are not told it."""
        ...

    def transfer_line(self, transfer_id: TransferId) -> bytes:
        """The header line that names the transfer to engines; empty: ``kv_transfer_params`` name it."""
        ...

    def retries(self, wanted: Retries) -> Retries:
        """The retries of the settings, ``wanted``, without those that this dialect cannot make."""
        ...

    def decode_params(self, params: DecodeParams) -> DecodeParams | bytes:
        """``kv_transfer_params`` for decode; bytes are JSON already. ``params``: without a token."""
        ...

    def prefill_params(self, reservation: Posted, attempt: Attempt, left_ms: int) -> Reservation | bytes:
        """``kv_transfer_params`` for prefill; bytes are JSON already."""
        ...

    def call_in(self, seal: bytes, body: Bytes, known: Container[TransferId]) -> Posted | LocalPrefill | None:
        """Decode's call; None: decode waits for no KV, and is told that all is well. ``known``: the transfers
        that run.

        Raises:
            BadCall: It is no reservation, or its caller may not reserve.
        """
        ...

    def spoils(self, event: Event, blame: Blame) -> bool:
        """Whether an attempt that ended with ``event`` makes the reservation useless for further attempts."""
        ...

    @property
    def must_hold_call(self) -> bool:
        """Whether decode gives its request up when its call to the metaserver breaks."""
        ...


class PdclusterDialect:
    """Engines with our connector: a token for each attempt, grants for each write, and an outcome that decode reads."""

    given_up = GAVE_UP
    prefill_goes_on = False
    no_proof = gives_back_unseen = ""
    must_hold_call = True

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def client_line(self, request_id: bytes) -> bytes:
        return b"x-request-id: %b\r\n" % request_id

    def transfer_line(self, transfer_id: TransferId) -> bytes:  # noqa: ARG002  # our parameters name it
        return b""

    def retries(self, wanted: Retries) -> Retries:
        return wanted

    def decode_params(self, params: DecodeParams) -> DecodeParams:
        token = self._secret.mint(params.transfer_id, params.attempt, params.deadline_ms)
        return msgspec.structs.replace(params, token=token)

    def prefill_params(self, reservation: Posted, attempt: Attempt, left_ms: int) -> Reservation:
        assert isinstance(reservation, Reservation), "another dialect's"
        token = self._secret.mint(reservation.transfer_id, attempt, left_ms)
        return for_attempt(reservation, attempt, token, deadline_ms=left_ms)

    def call_in(
        self,
        seal: bytes,
        body: Bytes,
        known: Container[TransferId],  # noqa: ARG002  # the seal proves the caller
    ) -> DecodeCall:
        """Checks the seal before it parses: 8 MiB of numbers cost 10 ms to check, but 0.5 s and 150 MB to parse."""
        try:
            self._secret.check_call(seal, body)
        except ProtocolError as error:
            raise BadCall(FORBIDDEN, str(error)) from error
        try:
            call = reservation_in(body) or parse_call(orjson.loads(body))
        except (orjson.JSONDecodeError, ProtocolError) as error:
            raise BadCall(BAD_REQUEST, str(error)) from error
        try:
            self._secret.check(call.token, call.transfer_id, call.attempt, call.deadline_ms)
        except ProtocolError as error:
            raise BadCall(FORBIDDEN, str(error), call.transfer_id, call.attempt) from error
        return call

    def spoils(self, event: Event, blame: Blame) -> bool:  # noqa: ARG002  # decode grants each attempt anew
        return False
