"""Each base model has a backlog and a queue of its own, where there are several."""

from __future__ import annotations

from pdcluster_protocol.labels import Role
from pdcluster_router.core.clients.admission import Admission
from pdcluster_router.core.clients.model_admissions import MAX_MODELS, ModelAdmissions

TWO = {Role.PREFILL: 2, Role.DECODE: 2}


def admissions() -> ModelAdmissions[str]:
    return ModelAdmissions(lambda: Admission(engine_tokens=100, max_queued=3, queue_s=30.0))


def num_enter(of: ModelAdmissions[str], base: str, role: Role = Role.PREFILL) -> int:
    """How many requests of 10 tokens enter."""
    pair = of.find(of.model_of(base))
    assert pair is not None
    return sum(pair[role].enter(10) for _ in range(1000))


def test_many_requests_for_one_model_take_no_place_of_another() -> None:
    all_of = admissions()
    all_of.set_engines(
        {"a": "a", "b": "b"},
        {Role.PREFILL: 5, Role.DECODE: 2},
        {"a": {Role.PREFILL: 1, Role.DECODE: 1}, "b": {Role.PREFILL: 4, Role.DECODE: 1}},
    )
    assert [num_enter(all_of, base) for base in ("a", "b", "unlisted")] == [10, 40, 50]
    assert all_of.sum_of(Role.PREFILL, lambda one: one.backlog_tokens) == 1000
    assert num_enter(all_of, "a", Role.DECODE) == 10


def test_all_names_of_a_model_have_one_queue() -> None:
    all_of = admissions()
    all_of.set_engines({"a": "a", "again": "a", "b": "b"}, TWO, {"a": TWO, "b": TWO})
    assert [all_of.model_of(base) for base in ("a", "again", "b", "", "other")] == ["a", "a", "b", "", ""]
    assert num_enter(all_of, "a") == 20
    assert num_enter(all_of, "again") == 0


def test_a_model_that_is_the_only_one_again_keeps_its_queue() -> None:
    all_of = admissions()
    all_of.set_engines({"a": "a", "b": "b"}, TWO, {"a": TWO, "b": TWO})
    own = all_of.find("a")
    assert own is not None
    assert num_enter(all_of, "a") == 20
    own[Role.PREFILL].queue("waiter", 10, now=0.0, deadline=9.0)
    all_of.set_engines({"a": "a"}, TWO, dict.fromkeys(all_of.models, TWO))
    assert all_of.find(all_of.model_of("a")) is own
    assert [one.num_queued for one in all_of] == [0, 0, 1, 0, 0, 0]
    own[Role.PREFILL].give_back(10)
    assert own[Role.PREFILL].admit(now=0.0) == ["waiter"]


def test_models_beyond_the_most_share() -> None:
    all_of = admissions()
    names = {f"m{number}": f"m{number}" for number in range(MAX_MODELS + 2)}
    all_of.set_engines(names, TWO, dict.fromkeys(names, TWO))
    assert len(all_of.models) == MAX_MODELS
    assert all_of.model_of(f"m{MAX_MODELS - 1}") != ""
    assert all_of.model_of(f"m{MAX_MODELS}") == all_of.model_of(f"m{MAX_MODELS + 1}") == ""
