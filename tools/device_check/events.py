"""Runs the self-test of events, which a rank makes at its start, five times. One honest verdict passes."""

from __future__ import annotations

import sys
from typing import Final

from tools.device_check.where import asked_device, leave_out

from pdcluster_connector.device import select_device
from pdcluster_connector.self_test.events import Products, try_events
from pdcluster_connector.self_test.judging import EventVerdict
from pdcluster_protocol.errors import ConfigError

TRIALS: Final = 5


def main() -> int:
    where = asked_device()
    if where.type == "cpu":
        leave_out("a CPU has no events")
    device = select_device(where.type)
    try:
        verdicts = [try_events(device, where, Products(device, where)) for _ in range(TRIALS)]
    except ConfigError as error:
        print(error)
        return 1
    print(f"{verdicts.count(EventVerdict.HONEST)} of {TRIALS} trials saw an event wait for its work")
    return 0 if EventVerdict.HONEST in verdicts else 1


if __name__ == "__main__":
    sys.exit(main())
