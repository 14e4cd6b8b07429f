"""What fake engines write: HTTP answers, chunks and errors, byte for byte."""

from __future__ import annotations

import json

from fakes.http import Message

QUESTIONS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""What vLLM answers without its engine's core."""

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-engine: fake\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_body(message: str, code: int) -> bytes:
    error = {"message": message, "type": "InternalServerError", "param": None, "code": code}
    return json.dumps({"error": error}).encode()


def answer(status: int, content_type: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def json_answer(status: int, body: bytes) -> bytes:
    return answer(status, "application/json", body)


def models_answer(*names: str, **adapters: str) -> bytes:
    """A list of models as vLLM writes it. ``adapters``: where each was loaded from, by its name."""
    bases = [{"id": name, "object": "model", "root": "/models/m", "parent": None} for name in names]
    others = [{"id": name, "object": "model", "root": root, "parent": names[0]} for name, root in adapters.items()]
    return json.dumps({"object": "list", "data": bases + others}).encode()


def get_answer(path: str) -> bytes:
    if path == "/health":
        return answer(200, "text/plain", b"")
    if path == "/v1/models":
        return json_answer(200, models_answer("m"))
    if path == "/version":
        return json_answer(200, b'{"version":"0.0"}')
    return json_answer(404, b'{"detail":"Not Found"}')


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def simple_answer(message: Message) -> bytes | None:
    """To what needs no core of an engine; None: it does. A question is told itself, and ``/detokenize`` is refused.

    As by vLLM, a body that is no JSON is refused: a gateway whose picker was killed may have cut it short.
    """
    if message.first_line.startswith("GET"):
        return get_answer(message.path)
    if message.path not in QUESTIONS:
        return None if _is_json(message.body) else json_answer(400, b'{"error": {"message": "no JSON"}}')
    asked = {"path": message.path, "body": message.body.decode(), "headers": message.headers}
    return json_answer(400 if message.path == "/detokenize" else 200, json.dumps(asked).encode())
