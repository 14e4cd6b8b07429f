"""Prompts with images on real engines: decode answers from the KV that prefill computed of the pictures.

The model is a tiny Qwen2-VL: positions of words depend on the images before them (M-RoPE), and decode works them out
itself. Where an image lies among computed tokens, vLLM does not give decode the image (0.32
``v1/core/sched/scheduler.py``).
"""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, ClassVar, Final

import pytest

from fakes.pictures import data_url, png
from integration.harness import Harness, HttpError, Pool, Server, blocks_in_use, eventually, post_json
from zoo import models, pools
from zoo.weights import ensure_model

pytestmark = [pytest.mark.engines, pytest.mark.costly]

MAX_TOKENS: Final = 6
ARGS: Final = ("--max-num-batched-tokens", "256", "--max-model-len", "4096", "--limit-mm-per-prompt", '{"image": 4}')
"""An image of 400 tokens is computed in two steps."""
SMALL, LARGE = (84, 56), (560, 560)
"""Of 6 tokens and of 400."""
QUESTION: Final = "Ask it about the weather and the sea, a river in spring and a town with seven bridges. " * 4
CHATS: Final[dict[str, tuple[str | tuple[int, int, int], ...]]] = {
    "words": (QUESTION,),
    "one image": ((*SMALL, 1), QUESTION),
    "the same image, other words": ((*SMALL, 1), "Why is the sky blue?"),
    "the same words, another image of its size": ((*SMALL, 2), QUESTION),
    "a large one": ((*LARGE, 3), QUESTION),
    "the same words, another large one": ((*LARGE, 4), QUESTION),
    "words before it": (QUESTION, (*LARGE, 3), "Who are you?"),
    "three": ((*SMALL, 1), (*LARGE, 3), (140, 84, 5), QUESTION),
    "three in another order": ((*SMALL, 1), (140, 84, 5), (*LARGE, 3), QUESTION),
    "one twice": ((*LARGE, 4), (*LARGE, 4), QUESTION),
    "of one shape": ((84, 140, 6), QUESTION),
    "of as many pixels and another shape": ((140, 84, 6), QUESTION),
}
"""Words, and images by width, height and seed."""


def content(parts: Sequence[str | tuple[int, int, int]]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(png(*part))}}
        for part in parts
    ]


def ask(url: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Greedy; the choice and its tokens."""
    body = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    return post_json(f"{url}/v1/chat/completions", body)


def said(reply: dict[str, Any]) -> pools.Said:
    choice = reply["choices"][0]
    steps = [[one["logprob"] for one in step["top_logprobs"]] for step in choice["logprobs"]["content"]]
    margins = tuple(max(step) - min(step) for step in steps)
    return pools.Said(tuple(reply["prompt_token_ids"]), tuple(choice["token_ids"]), margins)


def ask_all(url: str, chats: Sequence[Sequence[str | tuple[int, int, int]]]) -> list[pools.Said]:
    with ThreadPoolExecutor(4) as threads:
        return [said(reply) for reply in threads.map(lambda parts: ask(url, content(parts)), chats)]


@pytest.fixture(scope="module")
def single(harness: Harness) -> Iterator[Server]:
    with harness.single_engine(ARGS, model=ensure_model(models.QWEN2_VL)) as engine:
        yield engine


@pytest.fixture(scope="module")
def pool(harness: Harness) -> Iterator[Pool]:
    model = ensure_model(models.QWEN2_VL)
    with harness.start_pool(model=model, prefill_args=ARGS, decode_args=ARGS) as pool:
        yield pool


def test_chats_with_images_answer_like_a_single_engine(single: Server, pool: Pool) -> None:
    wanted = ask_all(single.url, list(CHATS.values()) * 2)
    first, again = wanted[: len(CHATS)], wanted[len(CHATS) :]
    by_name = dict(zip(CHATS, first, strict=True))
    one, other = by_name["one image"], by_name["the same words, another image of its size"]
    assert one.prompt == other.prompt, "words alone tell them apart"
    assert one.token_ids != other.token_ids
    seen = len(pool.decode[0].read_trace("receive"))
    for expected in (first, again):
        answers = [one.token_ids for one in ask_all(pool.url, list(CHATS.values()))]
        assert pools.wrong(expected, answers, pools.FULL_ROUNDING) == []
    pools.require_pushed(pool.prefill[0], pool.decode[0], seen, at_least=2 * len(CHATS))
    assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


class Camera(http.server.BaseHTTPRequestHandler):
    """Brings each caller another picture under ``/now``, and always the same one under ``/still``."""

    seen: ClassVar[list[int]] = []
    """Seeds of the pictures of ``/now``."""

    def do_GET(self) -> None:
        seed = 1
        if self.path == "/now":
            seed = 100 + len(self.seen)
            self.seen.append(seed)
        picture = png(*SMALL, seed)
        self.send_response(200)
        self.send_header("content-type", "image/png")
        self.send_header("content-length", str(len(picture)))
        self.end_headers()
        self.wfile.write(picture)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def camera() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Camera) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def by_url(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]


def test_an_image_behind_a_url_is_pushed_if_both_engines_get_the_same_one_and_never_if_not(
    single: Server, pool: Pool
) -> None:
    with camera() as url:
        wanted = said(ask(single.url, by_url(f"{url}/still")))
        assert said(ask(pool.url, by_url(f"{url}/still"))).token_ids == wanted.token_ids
        with pytest.raises(HttpError, match="images whose URLs bring both engines the same bytes") as refused:
            ask(pool.url, by_url(f"{url}/now"))
    assert refused.value.status == HTTPStatus.BAD_GATEWAY
    assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
    receipts = [line["outcome"] for line in pool.decode[0].read_trace("receive")][-2:]
    assert receipts == ["received", "failed"]


def test_decode_itself_computes_a_prompt_whose_image_has_changed(harness: Harness, single: Server) -> None:
    """The single engine shows the right answers for the pictures that the camera gave."""
    model = ensure_model(models.QWEN2_VL)
    start = harness.start_pool(model=model, prefill_args=ARGS, decode_args=ARGS, load_failure_policy="recompute")
    num_before = len(Camera.seen)
    with camera() as url, start as pool:
        answer = said(ask(pool.url, by_url(f"{url}/now")))
        assert [line["outcome"] for line in pool.decode[0].read_trace("receive", 1)] == ["failed"]
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
    possible = ask_all(single.url, [((*SMALL, seed), QUESTION) for seed in Camera.seen[num_before:]])
    assert answer.token_ids in {one.token_ids for one in possible}


def messages(picture: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": MAX_TOKENS, "temperature": 0}


def responses(picture: bytes) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": data_url(picture)}, {"type": "input_text", "text": QUESTION}]
    item = {"role": "user", "content": parts}
    return {"input": [item], "max_output_tokens": MAX_TOKENS, "temperature": 0, "store": False}


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/messages", messages, lambda reply: reply["content"][0]["text"]),
        ("/v1/responses", responses, lambda reply: reply["output"][0]["content"][0]["text"]),
    ],
)
def test_other_apis_bring_images_too(
    single: Server,
    pool: Pool,
    path: str,
    body: Callable[[bytes], dict[str, Any]],
    text_of: Callable[[dict[str, Any]], str],
) -> None:
    seen = len(pool.decode[0].read_trace("receive"))
    request = {**body(png(*LARGE, 9)), "model": str(ensure_model(models.QWEN2_VL))}
    wanted, answer = (text_of(post_json(f"{server.url}{path}", request)) for server in (single, pool))
    assert answer == wanted != ""
    pools.require_pushed(pool.prefill[0], pool.decode[0], seen, at_least=1)
