"""Messages between one prefill rank and one decode rank, beside the KV bytes.

    prefill                                   decode
      Hello ------------------------------------>      once per connection: who am I, what is my KV
      <------------------------ Welcome / Refusal      where your bytes go, or why not
      Open ------------------------------------->      may I write for (transfer, attempt)?
      <----------------- Grant / Unneeded / Denial     yes, for a lease / I have it all / no and why
      Progress --------------------------------->      I am alive and still writing: renews the lease
      ...                                              KV bytes travel by the transport
      Done / Failed ---------------------------->      last byte acknowledged / I have given up
      <------------------------ Again / Settled        push these tokens once more / I need nothing more of you
      <----------------------------------- Revoke      stop writing
      Fenced ----------------------------------->      I write no more for (transfer, attempt)

A frame is one version byte, one seal and one msgpack map with a ``type`` tag. Unknown types, unknown fields,
frames over ``MAX_FRAME_BYTES`` and frames without a valid seal of their connection are refused.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final, TypeVar, get_args

import msgspec
from msgspec import Meta

from pdcluster_protocol.adapters import AdapterContent
from pdcluster_protocol.bounds import (
    MAX_BYTES,
    AttemptNumber,
    Count,
    CountOrNone,
    Index,
    Milliseconds,
    NumBytes,
    Side,
    odd_number,
)
from pdcluster_protocol.errors import NO_JSON, ProtocolError
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import BootId, EngineId, TransferId
from pdcluster_protocol.secret import SEAL_BYTES, SECRET_VARIABLE, Secret

SIDE_CHANNEL_VERSION: Final = 4
MAX_FRAME_BYTES: Final = 4 << 20
"""A Welcome names each region of each layer: about 100 bytes a region, 200 with runs, so this holds 20,000 of them."""
MAX_HEADS: Final = 1 << 16
"""KV heads of a layer: far above any model."""
MAX_SUMS_BYTES: Final = 1 << 20
"""Most bytes of one list of sums, each of 8 bytes: enough for 128 layers of 1,024 heads."""
MAX_PLACES: Final = 1 << 14
"""Regions, or ranges of tokens, that may be named for a second push."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class RegionKind(Enum):
    """How a region's pages are filled. A *cell* is one token's KV in one head."""

    HEADS = "heads"
    """[head][token][cell]: a rank's heads are rows, each with a page's tokens side by side."""
    TOKENS = "tokens"
    """[token][head][cell]."""
    LATENT = "latent"
    """[token][cell]: no heads; every rank of a stage holds the same bytes (MLA)."""
    STATE = "state"
    """One block for a request (Mamba, GDN). Its ``runs`` say how TP shards it."""


class StateRun(msgspec.Struct, frozen=True, array_like=True):
    """A part of a state that TP ranks share by one rule: q of a convolution, or the heads of the state itself.

    A run has rows of one length, at ``offset`` and then every ``row_stride`` bytes. A row has the rank's units side by
    side.
    Example: q of Qwen3-Next's convolution at TP 2, layout SD: 16 units (key heads), of which the rank has 8, in 3 rows.
    """

    units: Annotated[int, Meta(ge=1, le=MAX_HEADS)]
    """Heads, groups or channels in the whole model. With more ranks than units each unit is on several ranks."""
    offset: NumBytes
    """Bytes from the page's begin to the first row."""
    num_rows: Count
    row_stride: NumBytes
    row_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]


class RegionLayout(msgspec.Struct, frozen=True, array_like=True):
    """One layer's KV in one rank's memory, in bytes: block ``b`` starts at ``base + b * block_stride``."""

    layer_name: str
    group: Index
    """Index of the KV cache group whose block table addresses this region."""
    base: NumBytes
    num_blocks: Count
    page_stride: NumBytes
    """Bytes from page to page; a block's pages follow each other. More than ``page_bytes`` if pages are padded."""
    page_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)]
    kind: RegionKind = RegionKind.HEADS
    heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)] = 1
    """KV heads of this layer in the whole model; 1 for a latent and for state."""
    page_tokens: Count = 16
    """Tokens in a page (vLLM's kernel block size)."""
    pages_per_block: Count = 1
    is_linear: bool = True
    """Whether token t of a row is its t-th cell, so that a page may be cut. False for vLLM's CPU kernels: they keep K
    transposed over the whole page."""
    window_step: CountOrNone = 0
    """A window begins at multiples of so many tokens (1: a sliding window), and prefill may lack the tokens before it.
    0: the layer has no window."""
    is_draft: bool = False
    """Whether the layer is a draft model's: decode can do without it if prefill has none."""
    runs: tuple[StateRun, ...] = ()
    """The parts of a state's page. Empty: they are not known, and only engines of equal TP can hand the state over."""

    @property
    def has_tokens(self) -> bool:
        """Whether its pages hold tokens side by side; if not, one block is a request's whole state."""
        return self.kind is not RegionKind.STATE

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self.page_tokens * self.pages_per_block

    @property
    def block_stride(self) -> int:
        """Bytes from block to block."""
        return self.page_stride * self.pages_per_block

    @property
    def span_bytes(self) -> int:
        """Bytes from the first block's begin to the last block's end; bytes of other layers may lie between."""
        return self.block_stride * self.num_blocks - self.page_stride + self.page_bytes


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """One rank of an engine, and its KV memory. ``stage``: its pipeline rank."""

    tp_rank: Index
    tp_size: Side
    regions: tuple[RegionLayout, ...]
    stage: Index = 0
    num_stages: Side = 1

    @property
    def has_draft(self) -> bool:
        """Whether a draft model keeps KV in this rank."""
        return any(region.is_draft for region in self.regions)

    @property
    def rank(self) -> int:
        """Its number among all ranks of its engine."""
        return self.stage * self.tp_size + self.tp_rank


class Hello(_Message, frozen=True, tag="hello"):
    """A prefill rank introduces itself. First frame of a connection."""

    engine_id: EngineId
    boot_id: BootId
    layout: RankLayout
    fingerprint: KvFingerprint
    transfer_protocol: str = ""
    """The protocol by which its bytes travel: ``tcp``, ``rdma`` or ``ascend``. Must be decode's."""


class Welcome(_Message, frozen=True, tag="welcome"):
    """The decode rank's memory, and the transport session that reaches it. With ``sessions: own`` the session is
    for this prefill engine alone."""

    engine_id: EngineId
    boot_id: BootId
    session: str
    layout: RankLayout
    transfer_protocol: str = ""


class Refusal(_Message, frozen=True, tag="refusal"):
    """No push is possible between these two engines. Final for this connection."""

    reason: str


class _OfAttempt(_Message, frozen=True):
    """A message about one attempt of one transfer."""

    transfer_id: TransferId
    attempt: AttemptNumber


class Open(_OfAttempt, frozen=True, tag="open"):
    """May this prefill rank write for this attempt? ``deadline_ms`` is the request's remaining time."""

    decode_boot_id: BootId
    deadline_ms: Milliseconds
    token: str
    """The router's token for this attempt."""
    adapter: AdapterContent | None = None
    """The LoRA adapter with which this rank computes the KV; None: the request has none."""


class Grant(_OfAttempt, frozen=True, tag="grant"):
    """Yes: until done, failed or revoked. Lost when decode hears nothing of this attempt for ``lease_ms``."""

    lease_ms: Milliseconds


class Unneeded(_OfAttempt, frozen=True, tag="unneeded"):
    """Write nothing: an earlier attempt has filled this rank. Nothing has failed."""


class Denial(_OfAttempt, frozen=True, tag="denial"):
    """No grant, and why. The attempt has failed for this rank."""

    reason: str


class Progress(_OfAttempt, frozen=True, tag="progress"):
    """This rank is alive and holds its grant; ``num_bytes`` are acknowledged so far. Renews the lease."""

    num_bytes: NumBytes


class ContentSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums of KV content, as 8 bytes each (unsigned, little endian): modulo 2^64 they add up over prefill ranks.

    The connector's ``core/content.py`` says which cells are counted and how the lists are numbered.
    """

    rows: Annotated[bytes, Meta(max_length=MAX_SUMS_BYTES)]
    """One sum for each counted region and KV head of the decode rank."""
    ranges: Annotated[bytes, Meta(max_length=MAX_SUMS_BYTES)]
    """One sum for each counted range of tokens, over all counted regions."""


class Done(_OfAttempt, frozen=True, tag="done"):
    """All that this rank had to write is acknowledged by the transport: ``num_bytes`` in ``num_layers`` layers.

    ``sums``: of the written content, read from this rank's own memory; None: the reservation wants none. A rank that
    sends sums keeps its source until decode says ``Again``, ``Settled`` or ``Revoke``, or the deadline has passed.
    """

    num_bytes: NumBytes
    num_layers: CountOrNone
    sums: ContentSums | None = None
    num_pushes: Annotated[int, Meta(ge=1, le=2)] = 1
    """2 after ``Again``."""


class Failed(_OfAttempt, frozen=True, tag="failed"):
    """This rank has given up. ``is_fenced``: it is fenced too, and clean; if not, a ``Fenced`` follows."""

    reason: str
    is_fenced: bool


class Again(_OfAttempt, frozen=True, tag="again"):
    """Decode's content differs from what was pushed: push these tokens of these regions again, under the same grant.

    Then say ``Done`` with ``num_pushes`` 2. The lease counts from this message on.
    """

    regions: Annotated[tuple[Index, ...], Meta(max_length=MAX_PLACES)]
    """Indices into the decode rank's own layout."""
    ranges: Annotated[tuple[tuple[CountOrNone, CountOrNone], ...], Meta(max_length=MAX_PLACES)]
    """Positions [start, stop) of the prompt; of state: (0, 1)."""


class Settled(_OfAttempt, frozen=True, tag="settled"):
    """Decode asks for no second push of this attempt: a rank that has said ``Done`` may let its source go."""


class Revoke(_OfAttempt, frozen=True, tag="revoke"):
    """Stop writing for this attempt and answer ``Fenced``."""


class Fenced(_OfAttempt, frozen=True, tag="fenced"):
    """This rank submits no more writes for this attempt, ever.

    ``is_clean``: every write that it submitted was acknowledged. Otherwise bytes may still be on their way, and only
    decode can shut them out, by closing the session that they travel on.
    """

    is_clean: bool


ToDecode = Hello | Open | Progress | Done | Failed | Fenced
ToPrefill = Welcome | Refusal | Grant | Unneeded | Denial | Again | Settled | Revoke

_M = TypeVar("_M", bound=msgspec.Struct)

_VERSION_BYTE: Final = bytes([SIDE_CHANNEL_VERSION])
_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_DECODE: Final[msgspec.msgpack.Decoder[ToDecode]] = msgspec.msgpack.Decoder(ToDecode)
_KINDS: Final = {kind.__struct_config__.tag: kind for kind in (*get_args(ToDecode), *get_args(ToPrefill))}
_TO_PREFILL: Final[msgspec.msgpack.Decoder[ToPrefill]] = msgspec.msgpack.Decoder(ToPrefill)


@dataclass(frozen=True, slots=True)
class Seal:
    """Seals and opens the frames of one connection. Refuses frames of others, and frames made without the secret."""

    secret: Secret
    connection: bytes

    def close(self, payload: bytes) -> bytes:
        """The frame that carries ``payload``."""
        return b"".join((_VERSION_BYTE, self.secret.seal(self.connection, payload), payload))

    def open(self, frame: bytes) -> memoryview:
        """The payload of ``frame``.

        Raises:
            ProtocolError: Too large, of another version, or not sealed with our secret for this connection.
        """
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(f"side-channel frame has {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
        if frame[:1] != _VERSION_BYTE:
            raise ProtocolError(_other_version(frame))
        payload = memoryview(frame)[1 + SEAL_BYTES :]
        if not hmac.compare_digest(frame[1 : 1 + SEAL_BYTES], self.secret.seal(self.connection, payload)):
            raise ProtocolError(
                "side-channel frame is not sealed for this connection: the decode engine has restarted, or router and "
                f"engines were not given the same {SECRET_VARIABLE}"
            )
        return payload


def seal_connection(secret: Secret, decode_boot_id: BootId, identity: bytes) -> Seal:
    """The seal of the connection that a prefill rank opened as ``identity`` to one life of a decode rank."""
    return Seal(secret, decode_boot_id.encode() + b"\0" + identity)


def encode_frame(message: ToDecode | ToPrefill, seal: Seal) -> bytes:
    """One frame, ready to send."""
    return seal.close(_ENCODER.encode(message))


def parse_to_decode(frame: bytes, seal: Seal) -> ToDecode:
    """A frame that a prefill rank sent.

    Raises:
        ProtocolError: Another version, too large, sealed for others, or not such a message.
    """
    return _parse(seal.open(frame), _TO_DECODE)


def parse_to_prefill(frame: bytes, seal: Seal) -> ToPrefill:
    """A frame that a decode rank sent.

    Raises:
        ProtocolError: Another version, too large, sealed for others, or not such a message.
    """
    return _parse(seal.open(frame), _TO_PREFILL)


def _parse(payload: memoryview, decoder: msgspec.msgpack.Decoder[_M]) -> _M:
    try:
        return decoder.decode(payload)
    except NO_JSON as error:
        raise ProtocolError(f"side-channel frame is not a known message: {_odd_number(payload) or error}") from error


def _odd_number(payload: memoryview) -> str:
    """The number that is out of its bounds, and its engine; empty: the fault is another one."""
    try:
        return _odd_number_in(msgspec.msgpack.decode(payload))
    except (*NO_JSON, TypeError):
        return ""  # TypeError: a key that Python cannot hash. RecursionError also where a deep list becomes text.


def _odd_number_in(said: object) -> str:
    if not isinstance(said, dict):
        return ""
    kind = _KINDS.get(str(said.get("type")))
    reason = odd_number(said, kind) if kind else ""
    return f"{said['type']} of engine {said['engine_id']}: {reason}" if reason and "engine_id" in said else reason


def _other_version(frame: bytes) -> str:
    theirs = frame[0] if frame else None
    return (
        f"side-channel peer speaks version {theirs}, ours is {SIDE_CHANNEL_VERSION}: "
        "run the same pdcluster on both engines"
    )
