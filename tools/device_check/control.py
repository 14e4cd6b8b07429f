"""The check of ``layers.py`` without device events: wrong bytes must arrive, or that check shows nothing."""

from __future__ import annotations

import sys

from tools.device_check.layers import SHAPE, TPS, push_one
from tools.device_check.pair import open_pair
from tools.device_check.where import asked_device, leave_out

from pdcluster_connector.device import AcceleratorDevice, DeviceEvent, TorchRuntime, select_device


class WithoutEvents(AcceleratorDevice):
    """While ``lies`` is set, tells the lanes at once that each layer is done."""

    lies = False

    def record(self) -> DeviceEvent:
        return None if self.lies else super().record()


def main() -> int:
    where = asked_device()
    if where.type == "cpu":
        leave_out("a CPU's kernel has ended when its call returns: events are nothing there")
    device = WithoutEvents(TorchRuntime(), select_device(where.type).registration_alignment_bytes)
    with open_pair(where, SHAPE, TPS[0], device) as pair:
        device.lies = True  # not before: a rank's self-test at its start would refuse the device
        wrong = push_one(pair, 0)
    print(f"without events wrong bytes came: {wrong}" if wrong else "no wrong byte came without events: nothing shown")
    return 0 if wrong else 1


if __name__ == "__main__":
    sys.exit(main())
