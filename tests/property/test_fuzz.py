"""A short run of the fuzzer, and a sight of it finding something."""

from __future__ import annotations

import pytest

from drawn import drawn
from fuzz import bodies, frames
from pdcluster_protocol.secret import Secret
from pdcluster_router.core.apis import rewrite

NUM_INPUTS = drawn(15_000)
SEEDS = [1, pytest.param(2, marks=pytest.mark.long)]


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_without_a_seal_change_nothing_and_without_a_token_grant_nothing(seed: int) -> None:
    frames.run(NUM_INPUTS, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_body_without_the_routers_token_and_the_clusters_seal_is_let_in(seed: int) -> None:
    bodies.run(NUM_INPUTS, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_body_of_a_client_steers_a_transfer(seed: int) -> None:
    bodies.run_clients(NUM_INPUTS, seed)


def test_the_fuzzer_finds_a_number_that_is_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rewrite.PREFILLED_APART, "n", (b"1", b"2.0"))
    with pytest.raises(AssertionError):
        bodies.run_clients(5_000, 1)


def test_the_fuzzer_finds_a_token_check_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Secret, "check", lambda *_: 1)
    with pytest.raises(AssertionError):
        frames.run(5_000, 1)
    with pytest.raises(AssertionError):
        bodies.run(5_000, 1)


def test_the_fuzzer_finds_a_seal_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Secret, "seal", lambda *_: b"0" * 16)
    with pytest.raises(AssertionError):
        frames.run(5_000, 1)
    monkeypatch.setattr(Secret, "check_call", lambda *_: None)
    with pytest.raises(AssertionError):
        bodies.run(5_000, 1)
