"""How many examples hypothesis draws: a ninth of them in ``make check`` and ``make test``, a third in ``make
test-costly``, all in ``make test-all``."""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Final

FEW_VARIABLE: Final = "PDCLUSTER_FEW_EXAMPLES"
"""Set by ``make check`` and ``make test``."""
ALL_VARIABLE: Final = "PDCLUSTER_ALL_EXAMPLES"
"""Set by ``make test-all``."""


def share(variables: Container[str]) -> int:
    """One example of how many is drawn where these environment variables are set."""
    if ALL_VARIABLE in variables:
        return 1
    return 9 if FEW_VARIABLE in variables else 3


_SHARE: Final = share(os.environ)


def drawn(num_examples: int) -> int:
    """The part of ``num_examples`` that this run draws, never none."""
    return max(1, num_examples // _SHARE)
