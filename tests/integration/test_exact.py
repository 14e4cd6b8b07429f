"""The pool answers token for token like a single vLLM engine on the same model."""

from __future__ import annotations

import base64
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from integration.harness import Harness, Pool, blocks_in_use, complete_all, eventually, post_json
from integration.kv_probe import PROBE_ARGS, PROBE_ENV
from integration.prompts import make_prompts
from zoo.models import llama
from zoo.weights import ensure_model

pytestmark = pytest.mark.engines

ROUNDING = 1e-3
"""Far above what the order of a sum changes in float32, far below a value of KV."""

MAX_TOKENS = 12
NO_CACHE = ("--no-enable-prefix-caching",)
ROOM = ("--kv-cache-memory-bytes", str(256 << 20))
"""65,536 tokens: 16 requests of 3,000 tokens fit without preemption."""
COMPILED = (*ROOM, "--no-enforce-eager")
ROOMY = ("--kv-cache-memory-bytes", str(1 << 30))
"""262,144 tokens: all prompts stay cached."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts and what a single engine answers to them, greedy."""

    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def reference(harness: Harness) -> Reference:
    return ask_single(harness, make_prompts())


def ask_single(harness: Harness, prompts: list[list[int]]) -> Reference:
    with harness.single_engine(ROOM) as engine:
        answers = complete_all(engine.url, prompts, MAX_TOKENS)
    return Reference(prompts, [answer.token_ids for answer in answers])


def answers_of(pool: Pool, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in complete_all(pool.url, prompts, MAX_TOKENS)]


def require_pushed(pool: Pool, at_least: int) -> None:
    """So many answers really came through a push, and none by a fallback that hides a failure."""
    assert eventually(lambda: sum(len(engine.read_trace("receive")) for engine in pool.decode) >= at_least)
    received = [line for engine in pool.decode for line in engine.read_trace("receive")]
    assert [line["reason"] for line in received if line["outcome"] != "received"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_args", "decode_args"),
    [
        pytest.param((), (), id="prefix caching"),
        pytest.param(NO_CACHE, NO_CACHE, id="no prefix caching"),
        pytest.param(("--max-num-batched-tokens", "192"), (), id="chunked prefill"),
        pytest.param(NO_CACHE, (), id="cache on decode only"),
    ],
)
def test_200_prompts_at_concurrency_16_answer_like_a_single_engine(
    harness: Harness, reference: Reference, prefill_args: tuple[str, ...], decode_args: tuple[str, ...]
) -> None:
    with harness.start_pool(prefill_args=(*ROOM, *prefill_args), decode_args=(*ROOM, *decode_args)) as pool:
        assert answers_of(pool, reference.prompts) == reference.answers
        # Prompts that are repeated while decode still has them, and those of one token, need no push.
        require_pushed(pool, at_least=150)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


@pytest.mark.slow
def test_a_warm_decode_cache_receives_only_what_it_lacks_and_answers_the_same(
    harness: Harness, reference: Reference
) -> None:
    with harness.start_pool(prefill_args=ROOMY, decode_args=ROOMY) as pool:
        first = answers_of(pool, reference.prompts)
        pushed = sum(line["num_bytes"] for line in pool.prefill[0].read_trace("push"))
        second = answers_of(pool, reference.prompts)
        again = sum(line["num_bytes"] for line in pool.prefill[0].read_trace("push")) - pushed
        assert first == second == reference.answers
        # Only the last block of each prompt is not in the cache the second time.
        assert again < pushed / 2


@pytest.mark.slow
def test_compiled_engines_answer_like_a_single_compiled_engine(harness: Harness, reference: Reference) -> None:
    # Each engine compiles its own: half a minute for eight layers, half of that for four.
    prompts, model = reference.prompts, ensure_model(llama(4))
    with harness.single_engine(COMPILED, model=model) as engine:
        expected = [answer.token_ids for answer in complete_all(engine.url, prompts, MAX_TOKENS)]
    with harness.start_pool(prefill_args=COMPILED, decode_args=COMPILED, model=model) as pool:
        assert answers_of(pool, prompts) == expected
        require_pushed(pool, at_least=150)


def test_two_prefill_and_two_decode_engines_answer_like_one(harness: Harness) -> None:
    """To sixty prompts, around the same borders as the 200 of the slow tests."""
    reference = ask_single(harness, make_prompts(60))
    with harness.start_pool(prefill=2, decode=2, prefill_args=ROOM, decode_args=ROOM) as pool:
        assert answers_of(pool, reference.prompts) == reference.answers
        require_pushed(pool, at_least=36)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert all(engine.read_trace("push", 1) for engine in pool.prefill)
        assert all(engine.read_trace("receive", 1) for engine in pool.decode)


@pytest.mark.parametrize("chunk", [pytest.param(2048, marks=pytest.mark.slow), 192])
def test_every_byte_of_every_layers_blocks_on_decode_equals_prefills(harness: Harness, chunk: int) -> None:
    """Blocks hold other ids on prefill than on decode: prefill has served another prompt before."""
    prompt = [100 + (number * 7) % 800 for number in range(700)]
    args = (*PROBE_ARGS, "--max-num-batched-tokens", str(chunk))
    with harness.start_pool(prefill_args=args, decode_args=PROBE_ARGS, env=PROBE_ENV) as pool:
        complete_all(pool.prefill[0].url, [[5] * 300], 1)
        complete_all(pool.url, [prompt], 1)
        decode = kv_blocks(pool.decode[0].url, "0")
        prefill = kv_blocks(pool.prefill[0].url, "-6")
    # 700 tokens fill 5 blocks of 128 and 60 slots of a sixth.
    assert decode.shape[:2] == (8, 6)
    assert (decode[:, :5] == prefill[:, :5]).all()
    # Decode computes the last token itself, in a step of its own: that token's values may be rounded otherwise.
    of_one_token = decode.shape[2] // 128
    assert (decode[:, 5] != prefill[:, 5]).sum(axis=1).max() <= of_one_token
    assert np.abs(decode[:, 5] - prefill[:, 5]).max() < ROUNDING
    assert len({block.tobytes() for layer in decode for block in layer}) == 6 * 8
    assert np.abs(decode).mean() > 10 * ROUNDING


def kv_blocks(url: str, first: str) -> npt.NDArray[np.float32]:
    """[layers, blocks, values of a block]: what an engine's used blocks hold from position ``first`` on."""
    (layers,) = post_json(f"{url}/collective_rpc", {"method": "kv_blocks", "args": [first]})["results"]
    return np.array([[np.frombuffer(base64.b64decode(block), np.float32) for block in layer] for layer in layers])
