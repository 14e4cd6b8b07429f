"""Checks that the device's content sum (decision 0018) equals the host's, and times it beside a plain sum."""

from __future__ import annotations

import sys
from typing import Final

import torch
from tools.device_check.where import asked_device, median_s

from pdcluster_connector.worker.content_pass import factors_of, odd_numbers, values_of

CELLS: Final = (512, 8, 256)
"""Tokens, heads, bytes: a chunk of 1 MiB."""
REPEATS: Final = 30
_MASK: Final = (1 << 64) - 1


def main() -> int:
    where = asked_device()
    content = torch.randint(0, 256, CELLS, dtype=torch.uint8)
    positions = torch.arange(CELLS[0])
    there = content.to(where), positions.to(where)
    for key in (0, 1 << 62, 77):
        ours, theirs = sum_of_cells(content, positions, key), sum_of_cells(*there, key)
        if ours != theirs:
            print(f"the device's sum is {theirs:016x}, the host's {ours:016x}")
            return 1
    sum_s, read_s = median_s(where, REPEATS, lambda: sum_of_cells(*there, 1), lambda: there[0].sum().item())
    mib = content.numel() >> 20
    print(f"equal; {mib} MiB in {sum_s * 1e6:.0f} us, {sum_s / read_s:.1f} times a plain sum of it")
    return 0


def sum_of_cells(content: torch.Tensor, positions: torch.Tensor, seed: int) -> int:
    """One sum over cells ``[positions, heads, bytes]``, uint8, any device."""
    weights = torch.from_numpy(odd_numbers(positions.cpu().numpy(), seed)).to(content.device)
    cells = content[:, :, None].clone()
    return int((values_of(cells, factors_of(cells))[..., 0] * weights[:, None]).sum().item()) & _MASK


if __name__ == "__main__":
    sys.exit(main())
