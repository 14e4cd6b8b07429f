"""What is asked of the endpoint, and what is said of its refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from patience import PATIENCE_S
from pdcluster_cli.local.chat import ChatError, QuestionRefused, served_model, stream_answer
from pdcluster_cli.local.command import _ask_first_question
from pdcluster_cli.local.options import parse_options

KEY = "of-engines"


class Engine(BaseHTTPRequestHandler):
    """It asks for a key, and lists one model."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        is_known = self.headers.get("authorization") == f"Bearer {KEY}"
        asked = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(400 if b"Please read this" in asked else 200 if is_known else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]} if is_known else {"error": "Unauthorized"}).encode())

    def log_message(self, *_: object) -> None: ...


@contextmanager
def running() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="engine")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_engines_key_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with running() as port:
        assert served_model(port, timeout_s=PATIENCE_S) == "tiny"


def test_who_shows_none_is_told_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    told = r"was answered 401: engines ask for a key: give it to all by VLLM_API_KEY, not by --api-key"
    with running() as port:
        with pytest.raises(ChatError, match=f"GET /v1/models {told}"):
            served_model(port, timeout_s=PATIENCE_S)
        with pytest.raises(ChatError, match=f"POST /v1/chat/completions {told}"):
            list(stream_answer(port, "tiny", "?", max_tokens=1, timeout_s=PATIENCE_S))


def test_a_question_that_the_model_does_not_take_ends_no_pool_that_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with running() as port:
        words = ["--port", str(port)]
        _ask_first_question(parse_options(words), [], [], lambda: "5 tokens by tcp")
        said = capsys.readouterr().err
        assert "POST /v1/chat/completions was answered 400" in said
        assert "the pool serves all the same, since KV went through it: 5 tokens by tcp" in said
        with pytest.raises(QuestionRefused):
            _ask_first_question(parse_options([*words, "--once"]), [], [], lambda: "")


def test_an_answer_without_its_last_event_is_not_taken_for_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with running() as port, pytest.raises(ChatError, match="ended without its last event"):
        list(stream_answer(port, "tiny", "?", max_tokens=1, timeout_s=PATIENCE_S))
