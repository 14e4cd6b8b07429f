"""Whether an engine has ended a request by itself, in the ``kv_transfer_params`` of its answer.

    router     {..., "wants_whole": true}         on either leg, or alone where decode prefills by itself
    engine     {"pdcluster_is_whole": true}       in its answer; left out where the request was given up

For APIs whose answers look the same when their engine gives them up. vLLM asks the connector for the parameters of an
answer as its scheduler ends the request (0.23 to 0.33, ``v1/core/sched/scheduler.py``). An answer that the API server
ends without the scheduler, as when the engine stops, has none.
"""

from __future__ import annotations

from typing import Final

import msgspec

WANTS_WHOLE: Final = "wants_whole"
IS_WHOLE: Final = "pdcluster_is_whole"
ALONE: Final = b'{"wants_whole":true}'
"""The parameters of a request that takes part in no transfer, as JSON. Both roles of an engine leave it alone."""


class SaidWhole(msgspec.Struct, frozen=True):
    """Engine to router, in its answer's ``kv_transfer_params``."""

    pdcluster_is_whole: bool = False
