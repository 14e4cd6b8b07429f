"""The first day: install, ask for a pool, ask the pool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import helm_python as helm
import openai

from campaign.questions import make_questions
from chart_cases.pages import QUICK_START, of
from e2e.cluster import eventually
from e2e.pool import SERVED_NAME
from e2e.subject import INTERNAL_PORT, PORT, SharedPool, Subject, name_of
from integration.harness import complete, metric
from integration.ports import fresh_port
from pdcluster_protocol.labels import Role

NUM_QUESTIONS = 24
VERIFIED = "pdcluster_router.requests.verifier verified revision="
KV_BYTES = 4096
"""Of one token of the tiny model, in float32 (``tiny_model.ModelShape``)."""
COUNTED_S = 30.0
"""Far above what an engine takes from a step to its metrics."""


def test_helm_test_passes_after_the_installation(release: helm.Config) -> None:
    done = release.test("pdcluster", timeout=120, logs=True)
    assert "the operator is ready" in str(done)


def test_a_new_pool_is_ready_because_a_router_has_verified_it(shared: SharedPool) -> None:
    """A router logs what it has proven; any of them may have been asked."""
    pool = shared.subject
    pool.wait_ready()
    said = [pool.cluster.run("-n", pool.namespace, "logs", name_of(pod)) for pod in pool.routers()]
    assert VERIFIED in "".join(said)


def test_a_new_pool_answers_as_a_single_engine_with_kv_that_prefill_has_pushed(shared: SharedPool) -> None:
    """Each prompt's first asking needs all of its KV, but for the last token's, which decode computes itself. Nothing
    failed on any side, so nothing was computed twice."""
    pool = shared.subject
    questions = make_questions()[:NUM_QUESTIONS]
    answers, before = pool.ask_prefill_alone(questions), read_flow(pool)
    for question, answer in answers.items():
        assert complete(pool.place().url, question.prompt, question.max_tokens).token_ids == answer.token_ids
    owed = [len(prompt) - 1 for prompt in {question.prompt for question in questions} if len(prompt) > 1]
    pushed, received = before.pushed_bytes + KV_BYTES * sum(owed), before.receives + len(owed)
    eventually(lambda: read_flow(pool).pushed_bytes >= pushed, "too little was pushed", COUNTED_S)
    eventually(lambda: read_flow(pool).receives >= received, "too little was received", COUNTED_S)
    assert read_flow(pool).failures == before.failures


def test_openais_own_client_is_answered(shared: SharedPool) -> None:
    client = openai.OpenAI(base_url=f"{shared.subject.place().url}/v1", api_key="none", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list().data] == [SERVED_NAME]
    chat = client.chat.completions.create(
        model=SERVED_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8


def test_why_asks_all_routers_through_the_api_server(shared: SharedPool) -> None:
    """By the id in vLLM's answer, and by its transfer id. Both roles are named by their pods."""
    pool = shared.subject
    answer = complete(pool.place().url, "What happened to this one?", 4).reply["id"]
    told = why(pool, answer)
    assert f"{answer.removeprefix('cmpl-')} went well after " in told
    assert f"(told by {pool.name}-router-" in told
    for role in (Role.DECODE, Role.PREFILL):
        assert any(f"{role.value}-" in told and f" is {name_of(pod)}" in told for pod in pool.pods(role)), told
    assert re.search(r"attempt 1: prefill-\d+ has done its part", told)
    (transfer_id,) = re.findall(r"transfer (\w+)", told)
    assert why(pool, transfer_id) == told


def test_the_quick_starts_two_lines_ask_the_pool_from_outside(shared: SharedPool) -> None:
    """As they stand on the page, but for the names of this pool and its model, and for a port that is free."""
    pool = shared.subject
    [forward] = [words for words in of("kubectl", QUICK_START) if "port-forward" in words]
    [curl] = of("curl", QUICK_START)
    port = fresh_port()
    names = {"tiny-router": f"{pool.name}-router", "8000:80": f"{port}:80", ":8000/": f":{port}/"}
    fitted = partial(fit, {**names, "Qwen/Qwen3-0.6B": SERVED_NAME})
    with pool.cluster.forwarding(pool.namespace, *map(fitted, forward[1:])):
        done = subprocess.run([*map(fitted, curl), "--silent", "--fail"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def why(pool: Subject, name: str) -> str:
    """What a user reads who asks about a request that went well."""
    words = ["why", name, "--cluster", pool.name, "-n", pool.namespace, "--kubeconfig", str(pool.cluster.kubeconfig)]
    done = subprocess.run(
        [sys.executable, "-m", "pdcluster_cli", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def fit(names: Mapping[str, str], word: str) -> str:
    """``word`` with these names in place of the page's."""
    for old, new in names.items():
        word = word.replace(old, new)
    return word


@dataclass(frozen=True, slots=True)
class Flow:
    """What engines and routers have counted since they started."""

    pushed_bytes: float
    receives: float
    failures: float


def read_flow(pool: Subject) -> Flow:
    """Of all of this pool's pods."""
    prefill, decode = ([url_of(pod) for pod in pool.pods(role)] for role in (Role.PREFILL, Role.DECODE))
    failed = [metric(url, "pdcluster:failures_total") for url in (*prefill, *decode)]
    failed += [metric(url_of(pod, INTERNAL_PORT), "pdcluster_router_failures_total") for pod in pool.routers()]
    return Flow(
        sum(counted(url, "pdcluster:pushed_bytes_total") for url in prefill),
        sum(counted(url, "pdcluster:receives_done_total") for url in decode),
        sum(failed),
    )


def counted(url: str, name: str) -> float:
    """An engine has no such line before its first."""
    try:
        return metric(url, name)
    except KeyError:
        return 0.0


def url_of(pod: dict[str, Any], port: int = PORT) -> str:
    return f"http://{pod['status']['podIP']}:{port}"
