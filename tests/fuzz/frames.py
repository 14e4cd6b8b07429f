"""Side-channel frames into a decode rank's reception: what a stranger, and what a member gone mad, may send."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec

from fuzz.mutations import noise, pack, spoil_bytes, spoil_fields
from pdcluster_connector.core.receiving import CutSession, ReceiveTimes, Reply
from pdcluster_connector.core.reception import (
    Compare,
    Differs,
    Ended,
    Expected,
    Invite,
    Lost,
    Reception,
    ReceptionCommand,
)
from pdcluster_connector.core.writers import PeerId, SessionId
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.fingerprint import KvFingerprint
from pdcluster_protocol.ids import Attempt, BootId, EngineId, RequestId, TransferId
from pdcluster_protocol.secret import make_secret
from pdcluster_protocol.side_channel import (
    Done,
    Failed,
    Fenced,
    Grant,
    Hello,
    Open,
    Progress,
    RankLayout,
    RegionKind,
    RegionLayout,
    ToDecode,
    Welcome,
    encode_frame,
    parse_to_decode,
    seal_connection,
)

OURS, THEIRS = make_secret("the secret of ours"), make_secret("the secret of theirs")
BOOT: Final = BootId("decode life")
MEMBER, STRANGER = PeerId(b"prefill life:0:x"), PeerId(b"stranger")
T, A = TransferId("t"), Attempt(1)
PRINT: Final = KvFingerprint("m", "f32", "LBHNC", (2,), "none", "0", "0")
LAYOUT: Final = RankLayout(0, 1, (RegionLayout("layer", 0, 4096, 8, 2048, 2048, RegionKind.HEADS, 2),))
_FRAMES_PER_LIFE: Final = 25
VALID: Final[tuple[ToDecode, ...]] = (
    Hello(EngineId("p"), BootId("prefill life"), LAYOUT, PRINT),
    Open(T, A, BOOT, 1000, OURS.mint(T, A, 1000)),
    Progress(T, A, 10),
    Done(T, A, 2048, 1),
    Failed(T, A, "why", is_fenced=True),
    Fenced(T, A, is_clean=True),
)


def new_reception() -> Reception:
    """One request waits, and nobody has said hello."""
    reception = Reception(Welcome(EngineId("d"), BOOT, "", LAYOUT), PRINT, ReceiveTimes(5.0, 3.0, 15.0), OURS)
    list(reception.expect(Expected(RequestId("r"), T, 1e9, (((0, 16),),)), now=0.0))
    return reception


def stranger_frames(rng: random.Random) -> Iterator[tuple[PeerId, bytes]]:
    """Frames that nobody with the secret has sealed for this connection."""
    while True:
        message = rng.choice(VALID)
        sealed_for = seal_connection(OURS, BOOT, MEMBER)
        match rng.randrange(5):
            case 0:
                yield STRANGER, noise(rng)
            case 1:
                yield MEMBER, encode_frame(message, seal_connection(THEIRS, BOOT, MEMBER))
            case 2:
                yield STRANGER, encode_frame(message, sealed_for)
            case 3:
                yield MEMBER, encode_frame(message, seal_connection(OURS, BootId("former life"), MEMBER))
            case _:
                frame = spoil_bytes(rng, encode_frame(message, sealed_for))
                if frame != encode_frame(message, sealed_for):
                    yield MEMBER, frame


def member_frames(rng: random.Random) -> Iterator[tuple[PeerId, bytes]]:
    """Well sealed frames with whatever in them; a member never gets the router's tokens by guessing."""
    seal = seal_connection(OURS, BOOT, MEMBER)
    while True:
        fields = msgspec.to_builtins(rng.choice(VALID))
        if fields["type"] == "open":
            fields["token"] = rng.choice(("", "1.00", THEIRS.mint(T, A, 1000), OURS.mint(T, Attempt(7), 1000)))
        payload = pack(fields if rng.random() < 0.3 else spoil_fields(rng, fields))
        yield MEMBER, seal.close(payload if rng.random() < 0.8 else spoil_bytes(rng, payload))


def hear(reception: Reception, peer: PeerId, frame: bytes, now: float) -> list[ReceptionCommand]:
    """What the receiver's thread does with one frame."""
    try:
        message = parse_to_decode(frame, seal_connection(OURS, BOOT, peer))
    except ProtocolError:
        return []
    commands = list(reception.hear(peer, message, now=now))
    for invite in [command for command in commands if isinstance(command, Invite)]:
        commands += reception.invited((invite.peer,), SessionId("session"), now=now)
    return commands


def is_harmless(command: ReceptionCommand) -> bool:
    """Whether this may follow from a frame without a valid token: no grant, no end, no cut."""
    match command:
        case Reply(_, message):
            return not isinstance(message, Grant)
        case Ended() | CutSession() | Compare() | Differs():
            return False
        case Invite() | Lost():
            return True


def run(num_inputs: int, seed: int) -> str:
    """Feed ``num_inputs`` frames of each kind.

    Raises:
        AssertionError: A frame changed what it must not change. Any other exception is a crash.
    """
    rng = random.Random(seed)
    _run_strangers(num_inputs, rng)
    for _ in range(0, num_inputs, _FRAMES_PER_LIFE):
        _run_members(rng)
    return f"{num_inputs} frames of strangers: nothing changed; {num_inputs} sealed frames, no token: nothing granted"


def _run_strangers(num_inputs: int, rng: random.Random) -> None:
    reception = new_reception()
    before = repr(reception)
    for number, (peer, frame) in enumerate(islice(stranger_frames(rng), num_inputs)):
        assert hear(reception, peer, frame, 1.0) == [], frame
        if number % 1000 == 0:
            assert repr(reception) == before, frame
    assert repr(reception) == before


def _run_members(rng: random.Random) -> None:
    """One life of a reception: a lost attempt ends what can go wrong in it, so it is a short one."""
    reception, now = new_reception(), 1.0
    for peer, frame in islice(member_frames(rng), _FRAMES_PER_LIFE):
        now += 0.001
        commands = hear(reception, peer, frame, now) + list(reception.expire(now=now))
        assert all(map(is_harmless, commands)), (frame, commands)
    assert reception.num_waiting == 1
