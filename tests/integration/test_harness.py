"""The engines that the other tests build on: real, equal to each other, and gone afterwards."""

from __future__ import annotations

import socket

import pytest

from integration.harness import Harness, Prompt, blocks_in_use, complete, complete_all, eventually, metric
from integration.ports import NUM_RANGES, claim, fresh_port, range_of
from pdcluster_cli.processes.waiting import EngineDied, is_healthy

pytestmark = pytest.mark.engines


@pytest.mark.slow
def test_two_engines_with_other_chunking_give_equal_greedy_answers(harness: Harness) -> None:
    prompts: list[Prompt] = ["Tell me a story", [7, 8, 9] * 40, "Why is the sky blue?"]
    with harness.single_engine() as one, harness.single_engine(["--max-num-batched-tokens", "64"]) as other:
        expected = complete_all(one.url, prompts, 24)
        assert [answer.token_ids for answer in complete_all(other.url, prompts, 24)] == [
            answer.token_ids for answer in expected
        ]
    assert all(len(answer.token_ids) == 24 for answer in expected)


@pytest.mark.slow
def test_the_tiny_model_depends_on_its_whole_prompt_and_does_not_repeat_itself(harness: Harness) -> None:
    prompt = [100 + number % 500 for number in range(300)]
    changed = [99, *prompt[1:]]
    with harness.single_engine() as engine:
        answers = complete_all(engine.url, [prompt, changed], 32)
    assert answers[0].token_ids != answers[1].token_ids
    assert len(set(answers[0].token_ids)) > 8


@pytest.mark.slow
def test_an_engine_has_no_blocks_in_use_after_its_answer(harness: Harness) -> None:
    with harness.single_engine(["--no-enable-prefix-caching"]) as engine:
        complete(engine.url, "Hello", 4)
        assert eventually(lambda: blocks_in_use(engine) == 0)
        with pytest.raises(KeyError):
            metric(engine.url, "vllm:no_such_metric")


@pytest.mark.slow
def test_a_stopped_engine_leaves_its_port(harness: Harness) -> None:
    with harness.single_engine() as engine:
        assert eventually(lambda: is_healthy(engine.port))
    # With any status: when an engine is stopped vLLM 0.32 looks at its own children, and may meet one that is a zombie.
    assert engine.handle.wait(0) is not None
    assert not is_healthy(engine.port)


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_named_with_its_last_lines(harness: Harness) -> None:
    with pytest.raises(EngineDied, match=r"single-\d+ has ended with status 2(?s:.*)no-such-option"):
        harness.single_engine(["--no-such-option"]).__enter__()


def test_no_two_processes_share_a_port_and_a_taken_one_is_not_given() -> None:
    given = [port for number in range(NUM_RANGES) for port in range_of(number)]
    assert len(given) == len(set(given))
    assert max(given) < 15_000
    port = fresh_port()
    with socket.create_server(("127.0.0.1", port + 1)):
        assert fresh_port() not in {port, port + 1}
    claims = [claim(number) for number in range(NUM_RANGES)]
    held = [number for number, one in enumerate(claims) if one is None]
    assert any(port in range_of(number) for number in held), "another process could claim the range of this port"
    for one in claims:
        if one is not None:
            one.close()
