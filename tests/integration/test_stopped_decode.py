"""A decode rank that stops and resumes: prefill's blocks come back, nothing torn is taken for whole."""

from __future__ import annotations

import signal
import time

import numpy as np

from integration.far_ranks import FarDecode, far_decode
from integration.ranks import LIFE, Cache, Shape, forward, prefill_rank, push_slice
from patience import EDGE_S, PATIENCE_S, until
from pdcluster_connector.assembly import PrefillRank
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import PrefillStep
from pdcluster_protocol.ids import RequestId

QUICK = Settings(quarantine_s=0.5, hold_s=0.5, lease_s=3.0, handshake_timeout_s=20.0)
BIG = Shape(num_layers=8, num_blocks=2048, kv_heads=32)


def push(
    rank: PrefillRank, far: FarDecode, name: str, blocks: list[int], *, deadline_ms: int = 20_000, is_last: bool = True
) -> None:
    """One forward pass that completes ``blocks``, bound for the same block ids on decode."""
    part = push_slice(name, far.address, blocks, blocks, deadline_ms=deadline_ms, is_last=is_last)
    forward(rank.worker, BIG, PrefillStep(LIFE, (part,)))


def test_source_blocks_come_back_while_decode_is_stopped_and_no_torn_prompt_is_received() -> None:
    """Writes are in flight for ever: prefill closes its own session, and only then gives the blocks back."""
    cache, blocks = Cache(BIG), list(range(1, BIG.num_blocks))
    with far_decode(BIG, QUICK) as far, prefill_rank(cache, QUICK) as rank:
        far.expect("warm", 1)
        push(rank, far, "warm", [1])
        assert until(lambda: far.ended() == {"warm": True}, EDGE_S)
        far.expect("a", len(blocks))
        far.signal(signal.SIGSTOP)
        push(rank, far, "a", blocks, deadline_ms=1500)
        rank.worker.finished([RequestId("warm"), RequestId("a")])
        assert until(lambda: "a" in rank.worker.finished([]), EDGE_S)
        cache.layers[:] = np.uint8(255)  # The blocks belong to another request now.
        far.signal(signal.SIGCONT)
        assert not until(lambda: far.ended().get("a", False), 3)
        far.cancel("a")
        assert until(lambda: far.ended().get("a") is False, EDGE_S)


def test_time_for_which_decode_is_stopped_is_none_of_its_requests_deadline() -> None:
    """The receiver counts running seconds: a machine that was suspended fails nobody for it when it goes on."""
    cache, blocks, deadline_s = Cache(BIG), list(range(1, 64)), 12.0
    with far_decode(BIG, QUICK) as far, prefill_rank(cache, QUICK) as rank:
        far.expect("a", len(blocks), deadline_ms=int(deadline_s * 1000))
        assert far.ended() == {}
        far.signal(signal.SIGSTOP)
        time.sleep(deadline_s)
        far.signal(signal.SIGCONT)
        push(rank, far, "a", blocks, deadline_ms=60_000)
        assert until(lambda: far.ended() == {"a": True}, deadline_s)


def test_a_decode_that_stops_for_longer_than_the_lease_does_not_lose_its_attempts() -> None:
    cache, blocks = Cache(BIG), list(range(1, 64))
    with far_decode(BIG, QUICK) as far, prefill_rank(cache, QUICK) as rank:
        far.expect("warm", 1)
        push(rank, far, "warm", [200])
        assert until(lambda: far.ended() == {"warm": True}, EDGE_S)
        far.expect("a", 2 * len(blocks))
        push(rank, far, "a", blocks, is_last=False)
        time.sleep(0.3)
        far.signal(signal.SIGSTOP)
        time.sleep(3 * QUICK.lease_s)
        far.signal(signal.SIGCONT)
        push(rank, far, "a", [64 + block for block in blocks])
        assert until(lambda: far.ended() == {"warm": True, "a": True}, PATIENCE_S)
