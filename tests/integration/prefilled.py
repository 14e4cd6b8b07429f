"""What a pool's prefill engines have computed, by the router's trace."""

from __future__ import annotations

from integration.harness import Pool


def num_prefilled(pool: Pool, since: float) -> int:
    """How many sequences that came after ``since``, in seconds of ``time.monotonic``, prefill has computed so far.

    The router writes a request's line when prefill has replied, too: that may be after decode's whole answer.
    """
    lines = (line for line in pool.router.read_trace("request") if line["received_at"] >= since)
    return sum(line["prefill_replied_at"] is not None for line in lines)
