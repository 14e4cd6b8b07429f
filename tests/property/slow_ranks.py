"""Two prefill ranks in this process: forward pass, resharder, exchange and lane, each on a stream that can be held.

What the connector promises is used at once: a part's buffer is given back when it was written, and blocks of a step
that is read are overwritten. So a wait that is missing anywhere ends in wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from fakes.async_device import STALE, AsyncRuntime, DeviceTensor, async_device
from fakes.stream_group import Meeting, StreamGroup
from fakes.streams import AsyncStream
from fakes.token_major import DecodeRank, Wanted, prefill_memory
from integration.reshard_ranks import Scenario, Written
from patience import PATIENCE_S, until
from pdcluster_connector.device import AcceleratorDevice
from pdcluster_connector.reshard.resharder import (
    Resharded,
    Resharder,
    ResharderContext,
    ReshardFailed,
    ReshardOutcome,
    StepRead,
)
from pdcluster_connector.reshard.rounds import GroupRank
from pdcluster_connector.reshard.staging import StagingMemory
from pdcluster_connector.reshard.tensors import TokenRegion

OTHER: Final = 0x11
"""What another request's kernels write into blocks that were given back."""


@dataclass
class SlowRank:
    """One prefill rank; its lane is a stream too."""

    rank: int
    scenario: Scenario
    runtime: AsyncRuntime
    device: AcceleratorDevice
    group: StreamGroup
    lane: AsyncStream
    failures: list[str] = field(default_factory=list)
    last_read: int = -1

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.wanted = [scenario.wanted(region) for region in range(2 * scenario.num_layers)]
        self.final = [self._final(region) for region in range(2 * scenario.num_layers)]
        self.memory: list[DeviceTensor] = [self.runtime.tensor(torch.full_like(final, STALE)) for final in self.final]
        regions = {
            index: TokenRegion(memory.view(-1), scenario.shape(index % 2), group=0)
            for index, memory in enumerate(self.memory)
        }
        with self.runtime.default:
            self.staging = StagingMemory(scenario.staging_bytes, torch.device("cpu"))
        us = GroupRank(self.rank, scenario.prefill_tp)
        self.decodes: dict[tuple[int, int, int], DecodeRank] = {}
        parts = ResharderContext(us, regions, self.staging, self.device, PATIENCE_S)
        self.resharder = Resharder(parts, self.group.as_process_group(), self._on_outcome)
        assert until(lambda: len(self.runtime.streams) == len(("forward", "exchange", "lane", "side")))

    def forward(self) -> None:
        """All steps are given to the device; none is waited for."""
        for step in range(len(self.scenario.steps)):
            self.resharder.begin_step(step, {0: [want.item for want in self.wanted[0][step]]})
            for layer in range(self.scenario.num_layers):
                for region in (2 * layer, 2 * layer + 1):
                    rows = torch.tensor(self._blocks(step))
                    self.memory[region].index_put_((rows,), self.final[region][rows])
                self.resharder.layer_saved((2 * layer, 2 * layer + 1), self.device.record())
            self.resharder.end_step()

    def written(self) -> Written:
        return {key: (decode.data, decode.writes) for key, decode in self.decodes.items()}

    def _final(self, region: int) -> torch.Tensor:
        """[block, byte]: what the model computes."""
        shape = self.scenario.shape(region % 2)
        wanted = [want for step in self.wanted[region] for want in step]
        data = prefill_memory(self.rank, self.scenario.prefill_tp, shape, wanted, self.scenario.num_blocks)
        return torch.from_numpy(data).view(self.scenario.num_blocks, shape.pages.block_stride)

    def _blocks(self, step: int) -> list[int]:
        return [block for want in self.wanted[0][step] for block in want.item.prefill_blocks]

    def _on_outcome(self, outcome: ReshardOutcome) -> None:
        match outcome:
            case Resharded(parts=parts) if parts:
                self.lane.give(partial(self._write, outcome))
            case ReshardFailed(reason=reason):
                self.failures.append(reason)
            case StepRead(step):
                self.runtime.default.give(partial(self._overwrite, self._blocks(step)))
                self.last_read = step
            case _:
                pass

    def _write(self, outcome: Resharded) -> None:
        """The lane's transport reads the buffer now."""
        buffer = self.staging.tensor.plain.numpy()[outcome.offset :]  # type: ignore[attr-defined]  # a DeviceTensor
        for part in outcome.parts:
            want = self.wanted[outcome.region][outcome.step][part.item]
            self._decode(outcome.region, want, part.decode_rank).write(part, want.item, buffer)
            assert outcome.ticket is not None
            self.resharder.release(outcome.ticket)

    def _overwrite(self, blocks: list[int]) -> None:
        for memory in self.memory:
            memory.plain[blocks] = OTHER

    def _decode(self, region: int, want: Wanted, decode_rank: int) -> DecodeRank:
        key = (region, want.item.decode_tp_size, decode_rank)
        if key not in self.decodes:
            shape = self.scenario.shape(region % 2)
            self.decodes[key] = DecodeRank.empty(want, shape, decode_rank, self.scenario.num_blocks)
        return self.decodes[key]


@contextmanager
def slow_ranks(scenario: Scenario) -> Iterator[list[SlowRank]]:
    """All ranks of the group, every stream held."""
    meeting = Meeting(scenario.prefill_tp)
    # The streams end first: a resharder waits for them.
    with ExitStack() as resharders, ExitStack() as devices:
        ranks = []
        for number in range(scenario.prefill_tp):
            device, runtime = devices.enter_context(async_device())
            group = StreamGroup(meeting, number, runtime)
            ranks.append(SlowRank(number, scenario, runtime, device, group, runtime.new_stream(torch.device("cpu"))))
            resharders.callback(ranks[-1].resharder.close, PATIENCE_S)
            for stream in runtime.streams:
                stream.hold()
        devices.callback(meeting.abort)
        yield ranks
