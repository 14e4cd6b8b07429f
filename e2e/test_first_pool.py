"""The first day: install, ask for a pool, ask the pool."""

from __future__ import annotations

import helm_python as helm
import openai

from campaign.questions import make_questions
from e2e.pool import SERVED_NAME
from e2e.subject import SharedPool
from integration.harness import complete

NUM_QUESTIONS = 24


def test_helm_test_passes_after_the_installation(release: helm.Config) -> None:
    done = release.test("pdcluster", timeout=120, logs=True)
    assert "the operator is ready" in str(done)


def test_a_new_pool_answers_as_a_single_engine(shared: SharedPool) -> None:
    url = shared.subject.place().url
    questions = make_questions()[:NUM_QUESTIONS]
    for question, answer in shared.subject.ask_prefill_alone(questions).items():
        assert complete(url, question.prompt, question.max_tokens).token_ids == answer.token_ids


def test_openais_own_client_is_answered(shared: SharedPool) -> None:
    client = openai.OpenAI(base_url=f"{shared.subject.place().url}/v1", api_key="none", max_retries=0, timeout=60)
    assert [model.id for model in client.models.list().data] == [SERVED_NAME]
    chat = client.chat.completions.create(
        model=SERVED_NAME, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8
