"""What the parent and the zygote process say to each other, over one SOCK_SEQPACKET pair.

    parent                                   zygote
      <------------------------- Ready           modules are imported
      StartOrder -------------------->
      <--- Started + read end of a pipe          the pipe gets the exit status as text when the engine has ended
      (socket closed) --------------->           kill every engine, then end

The pipe makes the exit pollable, one for each engine. A pipe that ends without a status: the zygote died, and the
kernel killed the engine with it.
"""

from __future__ import annotations

from typing import Final

import msgspec

MAX_MESSAGE_BYTES: Final = 1 << 17
"""Holds any command line; a socket's default buffer is 208 KiB."""


class Ready(msgspec.Struct, frozen=True):
    """The zygote can fork. ``num_threads`` must be 1, or a fork may inherit a lock that is never released."""

    import_s: float
    num_threads: int


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Run ``module`` as ``python -m`` does. In ``env`` a null value unsets the variable.

    ``overrides`` are module attributes, by dotted name, that are set before the module runs. What Python code
    writes to stdout and stderr goes to ``log_path``, each line with ``[name]`` in front.
    """

    name: str
    module: str
    argv: tuple[str, ...]
    env: dict[str, str | None]
    overrides: dict[str, str]
    log_path: str


class Started(msgspec.Struct, frozen=True):
    pid: int
