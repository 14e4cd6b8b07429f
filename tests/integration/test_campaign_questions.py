"""What the single engine of a campaign is asked for, and which of its answers engines of several ranks must give."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from campaign.build import TP_ROUNDING, Setup
from campaign.questions import Answer, Question, ask_for_clear_answers, ask_single_engine, make_questions
from campaign.run import expected_of

LOGPROBS: Final = {"logprobs", "top_logprobs", "prompt_logprobs"}


@contextmanager
def single_engine(asked: list[dict[str, Any]]) -> Iterator[str]:
    """Its URL. It chooses token 7, the clearer the longer the prompt, and keeps what it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            choice: dict[str, Any] = {"token_ids": [7], "text": "g", "finish_reason": "length"}
            if body.get("logprobs"):
                unclear = {"token_id:8": -0.5 - len(body["prompt"]) * TP_ROUNDING / 2, "token_id:7": -0.5}
                steps = [unclear, {"token_id:7": -0.1, "token_id:9": -3.0}]
                choice["logprobs"] = {"top_logprobs": steps}
            reply = json.dumps({"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parent's word
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "asks"), [(1, 1, False), (2, 1, True), (1, 2, True)])
def test_logprobs_are_asked_for_only_where_some_engine_has_several_ranks(
    tmp_path: Path, prefill_tp: int, decode_tp: int, asks: bool
) -> None:
    asked: list[dict[str, Any]] = []
    setup = Setup(tmp_path, tmp_path, 1, prefill_tp=prefill_tp, decode_tp=decode_tp)
    with single_engine(asked) as url:
        expected = expected_of(url, setup)
    assert len(asked) == len(make_questions())
    assert {bool(LOGPROBS & body.keys()) for body in asked} == {asks}
    assert (len(expected) < len(asked)) is asks


def test_who_asks_for_the_answers_alone_never_asks_for_logprobs() -> None:
    """So the stories of ``e2e`` ask an engine in a pod, which has no C++ compiler."""
    asked: list[dict[str, Any]] = []
    question = Question((1, 2, 3), 1)
    with single_engine(asked) as url:
        assert ask_single_engine(url, [question]) == {question: Answer((7,), "g", "length")}
    assert [LOGPROBS & body.keys() for body in asked] == [set()]


def test_a_question_whose_answer_was_chosen_by_a_hair_is_left_out() -> None:
    clear, unclear = Question((1, 2, 3), 1), Question((1,), 1)
    with single_engine([]) as url:
        assert ask_for_clear_answers(url, [unclear, clear], TP_ROUNDING) == {clear: Answer((7,), "g", "length")}
