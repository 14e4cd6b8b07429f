"""Processes of tests that begin with PyTorch loaded: forked from one server of this test session, once it has done so.

PyTorch is 3 s of CPU for each process that imports it. The server ends with the session.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking_context() -> ForkServerContext:
    """``Process`` and ``Pipe`` of such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pdcluster_connector.assembly"])
    return context
