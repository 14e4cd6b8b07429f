"""The first day: install, ask for a pool, ask the pool, take it away."""

from __future__ import annotations

import time

import helm_python as helm
import openai

from campaign.questions import make_questions
from e2e.cluster import Cluster, eventually
from e2e.pool import SERVED_NAME, NodePaths, cpu_pool
from e2e.subject import Subject
from integration.harness import complete

NUM_QUESTIONS = 24
GONE_S = 120.0


def test_helm_test_passes_after_the_installation(release: helm.Config) -> None:
    done = release.test("pdcluster", timeout=120, logs=True)
    assert "the operator is ready" in str(done)


def test_a_pool_comes_answers_as_a_single_engine_goes_and_leaves_nothing(
    cluster: Cluster, release: helm.Config, paths: NodePaths
) -> None:
    subject = Subject(cluster, "tiny")
    began_at = time.monotonic()
    subject.apply(cpu_pool(paths, "tiny"))
    subject.wait_ready()
    print(f"\npool Ready {time.monotonic() - began_at:.1f} s after kubectl apply")

    place = subject.place()
    url = f"http://{place.host}:{place.port}"
    questions = make_questions()[:NUM_QUESTIONS]
    for question, answer in subject.ask_prefill_alone(questions).items():
        assert complete(url, question.prompt, question.max_tokens).token_ids == answer.token_ids

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list().data] == [SERVED_NAME]
    chat = client.chat.completions.create(
        model=SERVED_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8

    cluster.run("-n", "default", "delete", "pdcluster", "tiny")
    eventually(lambda: not subject.leftovers(), f"left: {subject.leftovers()}", GONE_S)
