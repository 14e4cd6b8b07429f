"""Bodies of all kinds: JSON that is none, is not ours, or claims what it must not.

Metaserver bodies and ``kv_transfer_params`` must not be let in; clients' bodies must not steer a transfer.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from fuzz.mutations import spoil_bytes, spoil_fields
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.ids import Attempt, BootId, EngineId, TransferId
from pdcluster_protocol.metaserver import SEAL_HEADER, decode_outcome
from pdcluster_protocol.params import (
    DecodeParams,
    Reservation,
    SideChannelAddress,
    parse_decode_params,
    to_wire,
)
from pdcluster_protocol.prefill_answer import prefill_answer_in
from pdcluster_protocol.secret import Secret, make_secret
from pdcluster_router.core.apis.messages import parse_messages
from pdcluster_router.core.apis.request_head import RequestHead, read_head
from pdcluster_router.core.apis.rewrite import BadBody, parse_body
from pdcluster_router.core.requests.dialect import PdclusterDialect
from pdcluster_router.http.cycle import HotCycle
from pdcluster_router.requests.reservation import take_reservation
from pdcluster_router.services import Services

OURS, THEIRS = make_secret("the secret of ours"), make_secret("the secret of theirs")
T: Final = TransferId("t")
RESERVATION: Final = Reservation(
    request_id="r", remote_block_ids=((1, 2),), remote_block_size=16, remote_engine_id=EngineId("d"),
    remote_host="127.0.0.1", remote_port=1, remote_tp_size=1, remote_cached_tokens=0, transfer_id=T, attempt=Attempt(1),
    deadline_ms=1000, remote_boot_id=BootId("b"),
    remote_side_channels=(SideChannelAddress("127.0.0.1", 1, BootId("b")),),
    num_prompt_tokens=32, prompt_digest="0" * 24,
)  # fmt: skip
PARAMS: Final = DecodeParams(metaserver="http://r/v1/metaserver", transfer_id=T, deadline_ms=1000)


@dataclass
class _Transfer:
    """A request that waits for its reservation."""

    num_reservations: int = 0

    def reserve(self, _reservation: Reservation, _cycle: object) -> None:
        self.num_reservations += 1


@dataclass
class _Cycle:
    """One metaserver call and its answers."""

    body: bytes
    seal: str
    statuses: list[int] = field(default_factory=list)

    @property
    def head(self) -> RequestHead:
        return read_head("1.1", [(b"host", b"router"), (SEAL_HEADER.encode(), self.seal.encode())])

    def take_body(self) -> bytes:
        return self.body

    def answer(self, status: int, body: bytes) -> None:
        assert not decode_outcome(body).is_ok
        self.statuses.append(status)


@dataclass
class _Metaserver:
    """As much of the router's ``Services`` as ``take_reservation`` looks at."""

    secret: Secret
    transfers: dict[TransferId, _Transfer] = field(default_factory=lambda: {T: _Transfer()})

    @property
    def dialect(self) -> PdclusterDialect:
        return PdclusterDialect(self.secret)

    @property
    def failures(self) -> _Metaserver:
        return self

    def tell(self, _failure: object) -> None:
        """A failure is counted and logged."""


def is_let_in(body: bytes, secret: Secret, seal: str | None = None) -> bool:
    """Whether the router's metaserver takes ``body`` as a reservation. What it refuses it answers, once, with 4xx.

    ``seal``: default: the right one.
    """
    metaserver, cycle = _Metaserver(secret), _Cycle(body, secret.seal_call(body) if seal is None else seal)
    take_reservation(cast("Services", metaserver), cast("HotCycle", cycle))
    is_in = metaserver.transfers[T].num_reservations == 1
    assert len(cycle.statuses) == 1 - is_in
    assert all(400 <= status < 500 for status in cycle.statuses)
    return is_in


def bodies(rng: random.Random) -> bytes:
    """One body; its token is never one that our router made for what the body says."""
    fields = to_wire(rng.choice((RESERVATION, PARAMS)))
    fields["token"] = rng.choice(("", "1.00", THEIRS.mint(T, Attempt(1), 1000), OURS.mint(T, Attempt(2), 1000)))
    if rng.random() < 0.7:
        fields = spoil_fields(rng, fields)
    body = msgspec.json.encode({k: v.decode("latin-1") if isinstance(v, bytes) else v for k, v in fields.items()})
    return spoil_bytes(rng, body) if rng.random() < 0.4 else body


_VALUES: Final = [
    1,
    2,
    1.0,
    2.0,
    "2",
    "1",
    True,
    False,
    None,
    [],
    {},
    [{}],
    'é\\"}',
    2**70,
    {"kv_transfer_params": 7},
    {"type": "tool"},
]
_KEYS: Final = ["n", "best_of", "echo", "use_beam_search", "prompt", "messages", "vllm_xargs", "kv_transfer_params",
                "ec_transfer_params", "stream", "max_tokens", "tool_choice", "x", ""]  # fmt: skip


def client_bodies(rng: random.Random) -> bytes:
    """What a client may send: keys twice, keys in escapes, values of any type, bytes that are spoiled."""
    members = [
        f"{_spelled(rng, rng.choice(_KEYS))}: {json.dumps(rng.choice(_VALUES))}" for _ in range(rng.randint(0, 6))
    ]
    space = rng.choice(["", " ", "\n\t"])
    body = f"{{{space}{f',{space}'.join(members)}{space}}}{space}".encode()
    body = rng.choice([b"", b"", b"\xef\xbb\xbf"]) + body
    return spoil_bytes(rng, body) if rng.random() < 0.4 else body


def is_passed_on(body: bytes) -> bool:
    """Whether the router takes ``body`` for a request; then engines see our parameters and one sequence.

    ``json`` is what vLLM reads it with. What that refuses the engine answers with 400.
    """
    try:
        parsed = parse_body(body)
    except BadBody:
        return False
    to_decode, to_prefill = b"".join(parsed.for_decode(PARAMS)), b"".join(parsed.for_prefill(RESERVATION))
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    seen = json.loads(to_decode)
    assert seen.pop("kv_transfer_params") == to_wire(PARAMS)
    assert seen.pop("ec_transfer_params", None) is None
    ours = ("kv_transfer_params", "ec_transfer_params")
    assert repr(seen) == repr({key: value for key, value in fields.items() if key not in ours})
    assert parsed.needs_local_prefill or all(
        _is_one(fields, key) for key in ("n", "best_of", "echo", "use_beam_search")
    )
    order = json.loads(to_prefill)
    assert (order["n"], order["max_tokens"], order["stream"]) == (1, 1, False)
    assert msgspec.convert(order["kv_transfer_params"], Reservation) == RESERVATION
    _require_the_same_as_messages(body, fields)
    return True


def _require_the_same_as_messages(body: bytes, fields: dict[str, object]) -> None:
    """As a request of Anthropic's API: one token for prefill, and our parameters on both engines."""
    parsed = parse_messages(body)
    seen = json.loads(b"".join(parsed.for_decode(PARAMS)))
    order = json.loads(b"".join(parsed.for_prefill(RESERVATION)))
    assert seen["kv_transfer_params"] == to_wire(PARAMS)
    assert msgspec.convert(order["kv_transfer_params"], Reservation) == RESERVATION
    assert (order["max_tokens"], order["stream"]) == (1, False)
    assert set(order) - set(fields) <= {"max_tokens", "stream", "kv_transfer_params"}


def run_clients(num_inputs: int, seed: int) -> str:
    """Feed ``num_inputs`` bodies of clients to the router's scan.

    Raises:
        AssertionError: One steers a transfer. Any other exception is a crash.
    """
    rng = random.Random(seed)
    num_passed = sum(is_passed_on(client_bodies(rng)) for _ in range(num_inputs))
    assert num_passed > num_inputs // 10
    return f"{num_inputs} client bodies: {num_passed} passed, none steers a transfer"


def _spelled(rng: random.Random, key: str) -> str:
    """A JSON string that means ``key``."""
    return '"' + "".join(f"\\u{ord(char):04x}" if rng.random() < 0.1 else char for char in key) + '"'


def _is_one(fields: dict[str, object], key: str) -> bool:
    value = fields.get(key)
    return (
        value is None or (value is False and key in ("echo", "use_beam_search")) or (value == 1 and type(value) is int)
    )


def run(num_inputs: int, seed: int) -> str:
    """Feed ``num_inputs`` bodies to everything that parses one.

    Raises:
        AssertionError: One was let in. Any other exception is a crash.
    """
    rng = random.Random(seed)
    genuine = msgspec.structs.replace(RESERVATION, token=OURS.mint(T, Attempt(1), 1000))
    call = msgspec.json.encode(genuine)
    seal = OURS.seal_call(call)
    assert is_let_in(call, OURS, seal)
    for _ in range(num_inputs):
        body = bodies(rng)
        changed = spoil_bytes(rng, call)
        assert changed == call or not is_let_in(changed, OURS, seal), changed
        assert not is_let_in(call, OURS, rng.choice(("", seal[1:], THEIRS.seal_call(call), OURS.seal_call(body))))
        assert not is_let_in(body, OURS) or _says_attempt_two(body), body
        _parse_otherwise(body)
    return f"{num_inputs} metaserver bodies: none was let in"


def _says_attempt_two(body: bytes) -> bool:
    """A spoiled attempt may happen to be the one that the token is for."""
    return bool(json.loads(body).get("attempt") == 2)


def _parse_otherwise(body: bytes) -> None:
    prefill_answer_in(body)
    for parse in (decode_outcome, lambda raw: parse_decode_params(json.loads(raw))):
        try:
            parse(body)
        except (ProtocolError, ValueError):
            continue
