"""What breaks while there is another engine: the client gets the right answer, and every block comes back."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from types import MappingProxyType
from typing import Final

import pytest

from integration.harness import Harness, Pool, Server, blocks_in_use, complete, eventually, metric
from integration.prompts import LONG, PROMPT
from integration.test_failures import (
    QUICK,
    SMALL_CHUNKS,
    Asking,
    require_openai_error,
    signal_all,
    stopped_in_the_middle,
    stopped_one,
)
from patience import PATIENCE_S

pytestmark = pytest.mark.engines

NO_CHANGES: Final[Mapping[str, float]] = MappingProxyType({})


@contextmanager
def pool_of(
    harness: Harness,
    prefill: int,
    decode: int,
    *,
    chunk: int = 32,
    changes: Mapping[str, float] = NO_CHANGES,
    **more: object,
) -> Iterator[Pool]:
    """``chunk``: tokens per step of prefill: with few, a long prompt takes long enough to break something in it."""
    quick = {**QUICK, **changes}
    chunks = ("--max-num-batched-tokens", str(chunk), "--no-enable-prefix-caching", "--max-num-seqs", "16")
    with harness.start_pool(
        prefill, decode, prefill_args=chunks, decode_args=SMALL_CHUNKS, prefill_connector=quick,
        decode_connector=quick, **more,  # type: ignore[arg-type]  # passed on
    ) as pool:  # fmt: skip
        yield pool
        require_discreet_logs(pool)


def require_discreet_logs(pool: Pool) -> None:
    """No line of ours about a failure names an address, a token or a prompt."""
    for server in (*pool.engines, pool.router):
        for line in server.log_path.read_text(errors="replace").splitlines():
            if "failure kind=" in line:
                assert "127.0.0.1" not in line, line
                assert not re.search(r"\b\d+\.[0-9a-f]{32}\b", line), line
                assert str(PROMPT[:3])[1:-1] not in line, line


def waiting_one(engines: tuple[Server, ...]) -> Server:
    """The engine in which a request waits for its KV."""
    waiting: list[Server] = []

    def is_there() -> bool:
        waiting[:] = [engine for engine in engines if metric(engine.url, "vllm:num_requests_waiting") > 0]
        return bool(waiting)

    assert eventually(is_there)
    return waiting[0]


def outcomes_of_second_attempts(engine: Server) -> list[str]:
    return [push["outcome"] for push in engine.read_trace("push") if push["attempt"] == 2]


def failures(engine: Server, kind: str) -> float:
    """How often ``kind`` has happened, by the engine's own metrics."""
    return metric(engine.url, "pdcluster:failures_total", f'kind="{kind}"')


def test_a_prefill_engine_killed_in_the_middle_is_replaced_by_another_with_the_same_reservation(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    with pool_of(harness, 2, 1) as pool:
        asking, victim = stopped_one(pool, lambda: Asking(pool, LONG))
        num_received = len(pool.decode[0].read_trace("receive"))
        signal_all(victim, signal.SIGKILL)
        asking.join(PATIENCE_S)
        assert asking.answer == expected[len(LONG)], asking.error
        *_, received = pool.decode[0].read_trace("receive", num_received + 1)
        assert received["outcome"] == "received"
        other = next(engine for engine in pool.prefill if engine is not victim)
        assert eventually(lambda: outcomes_of_second_attempts(other) == ["done"])
        assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


@pytest.mark.slow
def test_a_prefill_engine_that_stops_in_the_middle_loses_its_lease_and_is_replaced(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    with pool_of(harness, 2, 1, chunk=16, changes={"lease_s": 3.0}) as pool:
        asking, victim = stopped_one(pool, lambda: Asking(pool, LONG))
        try:
            asking.join(PATIENCE_S)
            assert asking.answer == expected[len(LONG)], asking.error
            assert eventually(lambda: failures(pool.decode[0], "attempt_lost") == 1)
        finally:
            signal_all(victim, signal.SIGCONT)
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]


@pytest.mark.slow
def test_writes_that_fail_on_one_prefill_engine_are_made_by_another(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    broken = {"kv_connector": "FailsEveryWrite", "kv_connector_module_path": "integration.broken"}
    with pool_of(harness, 2, 1, first_prefill_kv_transfer=broken) as pool:
        for _ in range(4):
            assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert eventually(lambda: failures(pool.decode[0], "attempt_lost") >= 1)
        assert failures(pool.prefill[0], "session_closed") >= 1


@pytest.mark.slow
def test_a_prefill_engine_that_cannot_reach_decode_is_replaced_by_one_that_can(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    lonely = {"kv_connector": "NeverConnects", "kv_connector_module_path": "integration.broken"}
    changes = {
        "lease_s": 3.0,
        "handshake_timeout_s": 5.0,
    }  # A prefill engine may take as long as both for its first word.
    with pool_of(harness, 2, 1, first_prefill_kv_transfer=lonely, changes=changes) as pool:
        begin = time.monotonic()
        assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]
        assert time.monotonic() - begin < QUICK["handshake_timeout_s"]
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert failures(pool.decode[0], "attempt_lost") == 1


def test_a_decode_engine_killed_before_its_first_byte_is_replaced_by_another(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    with pool_of(harness, 1, 2) as pool:
        asking = stopped_in_the_middle(pool, lambda: Asking(pool, LONG))
        asked = waiting_one(pool.decode)
        asked.handle.signal(signal.SIGKILL)
        signal_all(pool.prefill[0], signal.SIGCONT)
        asking.join(PATIENCE_S)
        assert asking.answer == expected[len(LONG)], asking.error
        assert eventually(lambda: blocks_in_use(*pool.prefill) == 0)


def test_when_no_prefill_engine_is_left_decode_recomputes_or_there_is_one_clear_error_as_the_router_is_told(
    harness: Harness, expected: dict[int, tuple[int, ...]]
) -> None:
    """Two routers over the same engines."""
    with (
        pool_of(harness, 2, 1, load_failure_policy="recompute") as pool,
        harness.router(pool.prefill, pool.decode, ("--on-prefill-failure", "fail")) as router,
    ):
        for engine in pool.prefill:
            engine.handle.signal(signal.SIGKILL)
        assert complete(pool.url, PROMPT, 16).token_ids == expected[len(PROMPT)]
        asking = Asking(Pool(router, pool.prefill, pool.decode), PROMPT)
        asking.join(PATIENCE_S)
        assert "could not be prefilled" in require_openai_error(asking.error)
        assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


@pytest.mark.parametrize("policy", [pytest.param("fail", marks=pytest.mark.slow), "recompute"])
def test_a_metaserver_that_decode_cannot_reach_ends_the_wait_at_once(
    harness: Harness, expected: dict[int, tuple[int, ...]], policy: str
) -> None:
    with pool_of(
        harness, 1, 1, load_failure_policy=policy, router_args=("--advertise-url", "http://127.0.0.1:9")
    ) as pool:
        begin = time.monotonic()
        asking = Asking(pool, PROMPT)
        asking.join(PATIENCE_S)
        assert time.monotonic() - begin < 10
        if policy == "recompute":
            assert asking.answer == expected[len(PROMPT)]
        else:
            require_openai_error(asking.error)
        assert eventually(lambda: blocks_in_use(*pool.decode) == 0)


def test_a_router_that_dies_leaves_nothing_behind_on_either_engine(harness: Harness) -> None:
    with pool_of(harness, 1, 1) as pool:
        asking = stopped_in_the_middle(pool, lambda: Asking(pool, LONG))
        pool.router.handle.signal(signal.SIGKILL)
        signal_all(pool.prefill[0], signal.SIGCONT)
        asking.join(PATIENCE_S)
        assert isinstance(asking.error, (HTTPException, OSError))
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)


def test_a_reservation_with_another_clusters_token_moves_nothing(harness: Harness) -> None:
    env = {"PDCLUSTER_SECRET": "the secret of another cluster"}
    with pool_of(harness, 1, 1, env=env) as pool:  # the router has none of it
        asking = Asking(pool, PROMPT)
        asking.join(PATIENCE_S)
        assert isinstance(json.loads(getattr(asking.error, "body", "{}")).get("error"), dict), asking.error
        assert eventually(lambda: blocks_in_use(*pool.engines) == 0)
        assert pool.prefill[0].read_trace("push") == []
