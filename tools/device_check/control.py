"""The check of ``layers.py`` with events taken out: wrong bytes must come, or that one shows nothing."""

from __future__ import annotations

import sys

from tools.device_check.layers import SHAPE, TPS, push_one
from tools.device_check.pair import open_pair
from tools.device_check.where import asked_device, leave_out

from pdcluster_connector.device import AcceleratorDevice, DeviceEvent, TorchRuntime, select_device


class WithoutEvents(AcceleratorDevice):
    """Tells the lanes that each layer is done at once, from the moment on at which ``lies`` is set."""

    lies = False

    def record(self) -> DeviceEvent:
        return None if self.lies else super().record()


def main() -> int:
    where = asked_device()
    if where.type == "cpu":
        leave_out("a CPU's kernel has ended when its call returns: events are nothing there")
    device = WithoutEvents(TorchRuntime(), select_device(where.type).registration_alignment_bytes)
    with open_pair(where, SHAPE, TPS[0], device) as pair:
        device.lies = True  # not before: the self-test at a rank's start would refuse it
        wrong = push_one(pair, 0)
    print(f"without events wrong bytes came: {wrong}" if wrong else "no wrong byte came without events: nothing shown")
    return 0 if wrong else 1


if __name__ == "__main__":
    sys.exit(main())
