"""What prefill says of its queue and its compute: the router's memory has it as moments of their own."""

from __future__ import annotations

import json
from typing import Final

import pytest

from fakes.access_log import ask
from fakes.router import Rig, running_rig
from fakes.words import OpenAIWords
from integration.test_router_why import about, story
from pdcluster_protocol.kept import KeptRequest
from pdcluster_router.core.telemetry.timeline import timeline_of

pytestmark = pytest.mark.anyio

WORK_S: Final = 0.2
SENT, COMPUTES, REPLIED = "prefill_sent prefill-0 1", "prefill_computes prefill-0 1", "prefill_replied prefill-0 1"
QUEUED: Final = "prefill_queued prefill-0 1"


async def kept(rig: Rig, monkeypatch: pytest.MonkeyPatch, **times: object) -> KeptRequest:
    """A request that prefill worked on for ``WORK_S``, and told these times of it."""
    said = {"choices": [{"text": "x"}], "kv_transfer_params": {f"pdcluster_{name}": one for name, one in times.items()}}
    monkeypatch.setattr(OpenAIWords, "one_token", lambda _: json.dumps(said).encode())
    rig.prefill.work_s = WORK_S
    assert (await ask(rig, x_request_id="R")).status == 200
    await rig.settled()
    return await about(rig, "R")


def of_prefill(request: KeptRequest) -> dict[str, float]:
    """Its moments, in the order in which they are kept."""
    return {
        told: one.at_s for told, one in zip(story(request), request.moments, strict=True) if one.engine == "prefill-0"
    }


async def test_queue_and_compute_end_with_prefills_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_rig() as rig:
        request = await kept(rig, monkeypatch, queued_s=0.05, computed_s=0.1)
    at = of_prefill(request)
    assert list(at) == [SENT, QUEUED, COMPUTES, REPLIED]
    assert at[REPLIED] - at[COMPUTES] == pytest.approx(0.1)
    assert at[COMPUTES] - at[QUEUED] == pytest.approx(0.05)
    assert at[SENT] < at[QUEUED]
    assert [step.text for step in timeline_of(request)][-6:-2] == [
        "attempt 1: sent to prefill-0",
        "attempt 1: waits in the queue of prefill-0",
        "attempt 1: prefill-0 computes the prompt",
        "attempt 1: prefill-0 has done its part",
    ]


async def test_a_wait_below_a_millisecond_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_rig() as rig:
        request = await kept(rig, monkeypatch, queued_s=0.0009, computed_s=0.1)
    assert list(of_prefill(request)) == [SENT, COMPUTES, REPLIED]


@pytest.mark.parametrize(
    ("queued_s", "computed_s"),
    [(None, None), (0.0, None), (0.0, 1e9), (1e9, 0.1), (-1.0, 0.1), (0.1, -0.1), ("0.1", 0.1), (1e300, 1e300)],
)
async def test_times_that_cannot_be_are_left_out(
    monkeypatch: pytest.MonkeyPatch, queued_s: object, computed_s: object
) -> None:
    async with running_rig() as rig:
        request = await kept(rig, monkeypatch, queued_s=queued_s, computed_s=computed_s)
    assert list(of_prefill(request)) == [SENT, REPLIED]
    assert request.outcome == "ok"


async def test_each_sequence_of_a_request_in_parts_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        b'{"choices": [{"text": "x"}], "kv_transfer_params": {"pdcluster_queued_s": 0.0, "pdcluster_computed_s": 0.1}}'
    )
    monkeypatch.setattr(OpenAIWords, "one_token", lambda _: said)
    async with running_rig() as rig:
        rig.prefill.work_s = WORK_S
        assert (await ask(rig, {"model": "m", "prompt": "p", "n": 2}, x_request_id="R")).status == 200
        await rig.settled()
        parts = [await about(rig, f"R-{number}") for number in range(2)]
    assert all(COMPUTES in of_prefill(part) for part in parts)
