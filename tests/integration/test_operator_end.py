"""An operator that has to end does, whatever a library's tasks do."""

from __future__ import annotations

import subprocess
import sys

from patience import PATIENCE_S

PROGRAM = """
import asyncio, sys
from pdcluster_operator import __main__, replica

async def stay():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def run(operator, stopped):
    operator.staying = asyncio.create_task(stay())
    await asyncio.sleep(0)
    raise RuntimeError("a fault of the test")

replica.Operator.run = run
replica.STOP_S = 0.2
sys.exit(__main__.main(sys.argv[1:]))
"""
FLAGS = ("--kube-api=http://127.0.0.1:1", "--lease-namespace=system", "--router-image=router:1")


def test_a_task_that_takes_no_cancellation_keeps_no_process() -> None:
    """As kopf's watches when one of them has failed: the session is closed, and they ask for another for ever."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *FLAGS], timeout=PATIENCE_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert "operator ended" in ended.stderr
    assert "a fault of the test" in ended.stderr
