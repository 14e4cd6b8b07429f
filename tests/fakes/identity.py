"""An identity provider: its keys, the tokens that it signs, and a server of its key set that may misbehave."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final

import jwt

from fakes.certificates import KINDS, Key

ISSUER: Final = "https://identity.example"
AUDIENCE: Final = "pool"
RULES: Final[Mapping[str, Any]] = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}
"""The settings beside the key set."""
KIND_OF: Final = {
    "RS256": "RSA",
    "RS512": "RSA",
    "PS256": "RSA",
    "ES256": "ECDSA with P-256",
    "ES384": "ECDSA with P-384",
    "ES512": "ECDSA with P-521",
    "EdDSA": "Ed25519",
}
"""By an algorithm, the kind of key that signs by it."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key of the provider."""

    key_id: str
    algorithm: str
    private: Key

    def jwk(self, **changes: Any) -> dict[str, Any]:
        """The public key as a key set has it. A member that is None is left out."""
        made = json.loads(jwt.get_algorithm_by_name(self.algorithm).to_jwk(self.private.public_key()))
        whole = {**made, "kid": self.key_id, "alg": self.algorithm, "use": "sig", **changes}
        return {name: value for name, value in whole.items() if value is not None and name != "key_ops"}

    def sign(self, claims: Mapping[str, Any], **headers: Any) -> str:
        whole: dict[str, Any] = {"kid": self.key_id, **headers}
        told = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(dict(claims), self.private, algorithm=self.algorithm, headers=told)


def signing_key(key_id: str = "first", algorithm: str = "ES256") -> SigningKey:
    """Always the same for one name and algorithm."""
    return _signing_key(key_id, algorithm)


@cache
def _signing_key(key_id: str, algorithm: str) -> SigningKey:
    return SigningKey(key_id, algorithm, KINDS[KIND_OF[algorithm]]())


def key_set(*keys: SigningKey) -> bytes:
    return json.dumps({"keys": [key.jwk() for key in keys]}).encode()


def claims_of(client: str = "alice", *, now: float | None = None, **changes: Any) -> dict[str, Any]:
    """The claims of a good token. A claim that is None is left out."""
    at = int(time.time() if now is None else now)
    whole = {"iss": ISSUER, "aud": AUDIENCE, "sub": client, "iat": at, "exp": at + 3600, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def token_of(client: str = "alice", key: SigningKey | None = None, **changes: Any) -> str:
    return (key or signing_key()).sign(claims_of(client, **changes))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


class Manner(Enum):
    """How the server answers."""

    WELL = "well"
    GARBAGE = "garbage"
    ENDLESS = "endless"
    """10 MB, as fast as they are taken."""
    SILENT = "silent"
    BUSY = "busy"
    """503."""
    MOVED = "moved"


class KeyServerFake:
    """Serves ``document`` over HTTP. Tests change it, and its manner."""

    def __init__(self, document: bytes) -> None:
        self.document = document
        self.manner = Manner.WELL
        self.num_questions = 0
        self.port = 0
        self.scheme = "http"
        self._server: asyncio.Server | None = None
        self._answers: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/keys?of=all"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """At the port that it had before, if it had one."""
        self.scheme = "https" if tls else "http"
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._answers):
            task.cancel()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answers.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                self.num_questions += 1
                await self._answer(writer)
        finally:
            self._answers.discard(task)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self.manner is Manner.SILENT:
            await asyncio.Event().wait()
        body = {Manner.GARBAGE: b"<html>", Manner.ENDLESS: b" " * (10 << 20)}.get(self.manner, self.document)
        status = {Manner.BUSY: "503 Busy", Manner.MOVED: "302 Found\r\nlocation: /elsewhere"}.get(self.manner, "200 OK")
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()


@asynccontextmanager
async def running_key_fake(document: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[KeyServerFake]:
    server = KeyServerFake(document)
    await server.start(tls)
    try:
        yield server
    finally:
        await server.stop()
