"""A process group inside one process, whose exchanges are work of the ranks' own streams, as NCCL's and HCCL's are.

    start()  -->  the exchange begins when the caller's stream has come there  -->  beside the host, and all streams
    wait()   -->  what the caller's stream is given from now on begins after the exchange; the host goes on

One ``Meeting`` joins the ranks; each has a ``StreamGroup``. No wait for a rank is longer than PATIENCE_S.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from fakes.async_device import AsyncRuntime, DeviceTensor
from fakes.streams import AsyncEvent
from patience import PATIENCE_S

_Split: TypeAlias = tuple[torch.Tensor, list[int]]
"""Memory, and how many bytes of it are each rank's."""


class Meeting:
    """Where all ranks exchange, one round after the other."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=PATIENCE_S)
        self._outgoing: list[Sequence[torch.Tensor]] = [()] * num_ranks

    def exchange(self, rank: int, received: Sequence[torch.Tensor], outgoing: Sequence[torch.Tensor]) -> None:
        """``received`` has what each rank sends to this one. Waits for all.

        Raises:
            BrokenBarrierError: A rank has left.
        """
        self._outgoing[rank] = outgoing
        self._barrier.wait()
        for target, pieces in zip(received, self._outgoing, strict=True):
            target.copy_(pieces[rank])
        self._barrier.wait()

    def abort(self) -> None:
        """No exchange any more."""
        self._barrier.abort()


class StreamWork:
    """One exchange."""

    def __init__(self, runtime: AsyncRuntime, end: AsyncEvent) -> None:
        self._runtime = runtime
        self._end = end

    def wait(self) -> None:
        """Of the caller's stream: the host does not wait."""
        self._runtime.current_stream().give_wait(self._end)


class StreamGroup:
    """One rank's end, as much of ``torch.distributed.ProcessGroup`` as the resharder asks for."""

    def __init__(self, meeting: Meeting, rank: int, runtime: AsyncRuntime) -> None:
        self._meeting = meeting
        self._rank = rank
        self._runtime = runtime
        self.stream = runtime.new_stream(torch.device("cpu"))

    def as_process_group(self) -> dist.ProcessGroup:
        """PyTorch's own is a C++ class that registers itself in the process: two ranks of one group cannot."""
        return cast("dist.ProcessGroup", self)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # PyTorch's name
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: object,  # PyTorch's signature
    ) -> StreamWork:
        ends = (_memory(output), output_split_sizes), (_memory(input), input_split_sizes)
        self.stream.give_wait(self._runtime.current_stream().record_event())
        self.stream.give(partial(self._exchange, *ends))
        return StreamWork(self._runtime, self.stream.record_event())

    def _exchange(self, received: _Split, outgoing: _Split) -> None:
        self._meeting.exchange(self._rank, torch.split(*received), torch.split(*outgoing))

    alltoall_base = all_to_all_single
    """Its name before PyTorch 2.13."""

    def abort(self) -> None:
        self._meeting.abort()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DeviceTensor), "the host's memory is given to a device's exchange"
    return tensor.plain
