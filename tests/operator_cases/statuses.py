"""What was found of a pool, and what its status then says."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pdcluster_operator.core.status.conditions import Counts
from pdcluster_operator.core.status.pool_status import Facts, Verification, reduce_status

ALL_READY: Final = Counts(wanted=2, least=1, replicas=2, updated=2, ready=2, updated_ready=2)
STARTING: Final = Counts(wanted=2, least=1, replicas=2, updated=2)
HALF_WAY: Final = Counts(wanted=2, least=1, replicas=3, updated=1, ready=2)

WELL: Final = Facts(
    generation=3,
    target="0a1b.2c3d.4e5f",
    prefill=ALL_READY,
    decode=ALL_READY,
    routers_wanted=2,
    routers_ready=2,
    deadline_s=600,
    verification=Verification.PASSED,
)
FIRST: Final = replace(WELL, prefill=STARTING, decode=STARTING, routers_ready=0, verification=Verification.NOT_ASKED)
NEXT: Final = replace(
    WELL, generation=4, target="ffff.2c3d.4e5f", prefill=HALF_WAY, decode=HALF_WAY, verification=Verification.NOT_ASKED
)

WELL_STATUS: Final = reduce_status(WELL, None, now=1000)
FAILED_STATUS: Final = reduce_status(
    replace(WELL, verification=Verification.FAILED, verification_error="no route"), None, now=1000
)
