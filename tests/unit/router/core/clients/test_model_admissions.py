"""Each base model has a backlog and a queue of its own, where there are several."""

from __future__ import annotations

from pdcluster_protocol.labels import Role
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.model_admissions import MAX_MODELS, ModelAdmissions


def admissions() -> ModelAdmissions[str]:
    return ModelAdmissions(lambda: Admission(engine_tokens=100, max_queued=3, queue_s=30.0))


def num_enter(of: ModelAdmissions[str], model: str, role: Role = Role.PREFILL) -> int:
    """How many requests of 10 tokens enter."""
    return sum(of.of(model)[role].enter(10) for _ in range(1000))


def test_a_crowd_for_one_model_takes_no_place_of_another() -> None:
    all_of = admissions()
    all_of.set_engines(
        {Role.PREFILL: 5, Role.DECODE: 2},
        {"a": {Role.PREFILL: 1, Role.DECODE: 1}, "b": {Role.PREFILL: 4, Role.DECODE: 1}},
    )
    assert [num_enter(all_of, model) for model in ("a", "b", "")] == [10, 40, 50]
    assert all_of.sum_of(Role.PREFILL, lambda one: one.backlog_tokens) == 1000
    assert num_enter(all_of, "a", Role.DECODE) == 10


def test_a_model_that_no_engine_lists_any_more_keeps_its_requests_and_the_limit_of_one_engine() -> None:
    all_of = admissions()
    all_of.set_engines({Role.PREFILL: 2, Role.DECODE: 2}, {"a": {Role.PREFILL: 2, Role.DECODE: 2}})
    pair = all_of.of("a")
    assert num_enter(all_of, "a") == 20
    pair[Role.PREFILL].queue("waiter", 10, now=0.0, deadline=9.0)
    all_of.set_engines({Role.PREFILL: 2, Role.DECODE: 2}, {})
    assert all_of.of("a") is pair
    assert [one.num_queued for one in all_of] == [0, 0, 1, 0]
    pair[Role.PREFILL].give_back(110)
    assert pair[Role.PREFILL].admit(now=0.0) == ["waiter"]


def test_models_beyond_the_most_share() -> None:
    all_of = admissions()
    pairs = [all_of.of(f"m{number}") for number in range(MAX_MODELS + 2)]
    assert pairs[MAX_MODELS - 1] is not all_of.shared
    assert pairs[MAX_MODELS] is pairs[MAX_MODELS + 1] is all_of.shared
    assert all_of.find(f"m{MAX_MODELS}") is None
