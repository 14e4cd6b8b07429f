"""Processes of tests that begin with PyTorch loaded: forked from one server of this test session, once it has done so.

PyTorch is 3 s of CPU for each process that imports it, and the sums of content 2 s for each that compiles them. The
server ends with the session.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final
from unittest.mock import patch

TESTS: Final = Path(__file__).parents[1]
PRELOADED: Final = ["torch", "torch.distributed", "pdcluster_connector.assembly", "integration.compiled"]


def forking_context() -> ForkServerContext:
    """``Process`` and ``Pipe`` of such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, PYTHONPATH=str(TESTS)):  # Python 3.11's server gets no sys.path from us
        forkserver.ensure_running()
    return context
