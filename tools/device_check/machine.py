"""Names the machine, and makes the checks of it that the connector makes when an engine starts."""

from __future__ import annotations

import platform
import sys

import torch
from tools.device_check.where import asked_device

from pdcluster_connector.self_test.machine import mooncake_builds, require_machine
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import TransferProtocol


def main() -> int:
    where = asked_device()
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__} for CUDA {torch.version.cuda}")
    print(f"device {where}: {describe(where)}")
    print(f"Mooncake: {', '.join(' '.join(build) for build in mooncake_builds()) or 'none'}")
    try:
        require_machine(where.type, TransferProtocol.TCP.value)
    except ConfigError as error:
        print(error)
        return 1
    print("fits")
    return 0


def describe(where: torch.device) -> str:
    if where.type != "cuda":
        return platform.processor() or platform.machine()
    free, total = torch.cuda.mem_get_info(where)
    return f"{torch.cuda.get_device_name(where)}, {free >> 20} of {total >> 20} MiB free"


if __name__ == "__main__":
    sys.exit(main())
