"""How many examples hypothesis draws: a third of them in ``make test``, all in ``make test-all``."""

from __future__ import annotations

import os
from typing import Final

ALL_VARIABLE: Final = "PDCLUSTER_ALL_EXAMPLES"
"""Set by ``make test-all``."""
_SHARE: Final = 1 if ALL_VARIABLE in os.environ else 3


def drawn(num_examples: int) -> int:
    """The part of ``num_examples`` that this run draws."""
    return num_examples // _SHARE
