"""The cluster's secret: who may speak at all, and who may write for which attempt.

    token   "<deadline ms>.<hex>"   the router's leave for one attempt of one transfer, passed on by decode and prefill
    seal    16 bytes                in each side-channel frame: a keyed digest over the connection and the message
    call    "<hex>"                 with decode's call to the metaserver: a keyed digest over its whole body
    order   "<hex>"                 in the reservation that decode makes and prefill checks: a keyed digest over it
    pass    "<unix seconds>.<hex>"  with an operator's order to a router: good for this body, until that time

Each is a MAC: BLAKE2b in its keyed mode (RFC 7693) with the cluster's secret, personalized for one of these purposes.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import ip_address
from typing import Final

from pdcluster_protocol.errors import ConfigError, ProtocolError
from pdcluster_protocol.ids import Attempt, TransferId

SECRET_VARIABLE: Final = "PDCLUSTER_SECRET"  # noqa: S105  # the name of a variable
MIN_SECRET_BYTES: Final = 16
SEAL_BYTES: Final = 16

_TOKEN: Final = b"pdcluster-token"
_SEAL: Final = b"pdcluster-seal"
_PASS: Final = b"pdcluster-pass"
_CALL: Final = b"pdcluster-call"
_ORDER: Final = b"pdcluster-order"

MAX_PASS_S: Final = 300
"""How far ahead a pass may end. 300: clocks of two nodes differ by seconds, and a stolen pass is soon worth nothing."""


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret that all parts of one cluster share. Its ``repr`` does not show the key."""

    _key: bytes = field(repr=False)
    is_well_known: bool = False
    """Whether the key is the built-in one, which protects nothing: for processes that only this machine reaches."""

    def mint(self, transfer_id: TransferId, attempt: Attempt, deadline_ms: int) -> str:
        """The token of one attempt, which may last ``deadline_ms`` at most. Router only; costs 2 us."""
        return f"{deadline_ms}.{self._mac(transfer_id, attempt, deadline_ms)}"

    def check(self, token: str, transfer_id: TransferId, attempt: Attempt, deadline_ms: int) -> None:
        """A caller that shows ``token`` may take ``deadline_ms`` more for this attempt of this transfer.

        Raises:
            ProtocolError: The token is not of this cluster, not for this attempt, or not for so long.
        """
        allowed_ms, _, mac = token.partition(".")
        if not (allowed_ms.isascii() and allowed_ms.isdigit() and len(allowed_ms) < _MAX_DIGITS and mac.isascii()):
            raise ProtocolError(
                f"transfer {transfer_id} attempt {attempt} came without a token: ask through the router"
            )
        if not hmac.compare_digest(mac, self._mac(transfer_id, attempt, int(allowed_ms))):
            raise ProtocolError(
                f"the token of transfer {transfer_id} attempt {attempt} is not valid here: "
                f"give router and engines of one cluster the same {SECRET_VARIABLE}"
            )
        if deadline_ms > int(allowed_ms):
            raise ProtocolError(
                f"transfer {transfer_id} attempt {attempt} asks for {deadline_ms} ms, its token allows {allowed_ms}"
            )

    def seal(self, connection: bytes, payload: bytes | memoryview) -> bytes:
        """``SEAL_BYTES`` that only holders of the secret can make for this message on this connection."""
        digest = blake2b(key=self._key, digest_size=SEAL_BYTES, person=_SEAL)
        digest.update(len(connection).to_bytes(4, "big"))
        digest.update(connection)
        digest.update(payload)
        return digest.digest()

    def seal_call(self, body: bytes | bytearray) -> str:
        """The proof that a holder of the secret wrote every byte of this call to the metaserver.

        The token in a reservation proves transfer and attempt. This proof also covers where the KV goes. 1.6 us for 8
        blocks, 20 us for 2,000 (15 KB) and 0.9 ms for 700 KB (2026-11-22, one core of a Xeon): ``python -m timeit -s
        "from hashlib import blake2b; b=bytes(700_000); k=bytes(32)" "blake2b(b, key=k, digest_size=16).hexdigest()"``.
        """
        return blake2b(body, key=self._key, digest_size=SEAL_BYTES, person=_CALL).hexdigest()

    def check_call(self, shown: bytes, body: bytes | bytearray) -> None:
        """A holder of the secret wrote ``body``. The check parses nothing of it.

        Raises:
            ProtocolError: ``shown`` is not the seal of this body by this cluster.
        """
        if len(shown) != 2 * SEAL_BYTES:
            raise ProtocolError("this call has no seal: run the same pdcluster on router and decode engines")
        if not hmac.compare_digest(shown, self.seal_call(body).encode()):
            raise ProtocolError(
                f"the seal of this call is not valid here: give router and engines of one cluster the same "
                f"{SECRET_VARIABLE}, and let nothing between them change a call's body"
            )

    def seal_order(self, said: bytes) -> str:
        """The proof that a holder of the secret has said where the KV of a transfer goes: ``params.sealed``."""
        return blake2b(said, key=self._key, digest_size=SEAL_BYTES, person=_ORDER).hexdigest()

    def mint_pass(self, body: bytes, expires_at_s: int) -> str:
        """The leave to carry ``body`` out until ``expires_at_s`` (Unix time), at most ``MAX_PASS_S`` ahead.

        The secret itself never travels, and a reader of the pass on its way can only repeat the same order.
        """
        return f"{expires_at_s}.{self._pass_mac(body, expires_at_s)}"

    def check_pass(self, shown: str, body: bytes, *, now_s: float) -> None:
        """A caller that shows this may have ``body`` carried out. ``now_s``: Unix time.

        Raises:
            ProtocolError: The pass is not of this cluster, not for this body, or not for this time.
        """
        ends, _, mac = shown.partition(".")
        if not (ends.isascii() and ends.isdigit() and len(ends) < _MAX_DIGITS and mac.isascii()):
            raise ProtocolError("this order came without a pass: only holders of the cluster's secret may give it")
        if not hmac.compare_digest(mac, self._pass_mac(body, int(ends))):
            raise ProtocolError(
                f"the pass is not valid here: give router and operator the same {SECRET_VARIABLE}, and send the body "
                "that it was made for"
            )
        if not now_s < int(ends) <= now_s + MAX_PASS_S:
            raise ProtocolError(
                f"the pass ends at {ends}, it is {now_s:.0f} here (Unix seconds): it must end within {MAX_PASS_S} s "
                "from now; set the clocks"
            )

    def _pass_mac(self, body: bytes, expires_at_s: int) -> str:
        said = b"%d:%b" % (expires_at_s, body)
        return blake2b(said, key=self._key, digest_size=16, person=_PASS).hexdigest()

    def _mac(self, transfer_id: TransferId, attempt: Attempt, deadline_ms: int) -> str:
        said = f"{attempt}:{deadline_ms}:{transfer_id}".encode()
        return blake2b(said, key=self._key, digest_size=16, person=_TOKEN).hexdigest()


_MAX_DIGITS: Final = 12


def make_secret(text: str) -> Secret:
    """The secret made from ``text``, which may have any length from ``MIN_SECRET_BYTES`` on.

    Raises:
        ConfigError: The text is shorter, so it could be guessed.
    """
    key = text.encode("utf-8", "surrogateescape")  # ``os.environ`` has bytes that are no UTF-8 as surrogates.
    if len(key) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(key)} bytes, the least is {MIN_SECRET_BYTES}: "
            "make one with: openssl rand -hex 32"
        )
    return Secret(blake2b(key, digest_size=32).digest())


def load_secret(environ: Mapping[str, str], *, host: str) -> Secret:
    """The secret in ``PDCLUSTER_SECRET``; without one, a well-known key that is good on a loopback ``host`` only.

    Raises:
        ConfigError: The secret is too short, or there is none and other machines can reach ``host``.
    """
    if text := environ.get(SECRET_VARIABLE):
        return make_secret(text)
    if not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines and {SECRET_VARIABLE} is not set: "
            "give every router and engine of the cluster the same secret in it (openssl rand -hex 32)"
        )
    return Secret(b"loopback", is_well_known=True)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
