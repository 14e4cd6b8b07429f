"""What a rank gets of another engine's recurrent state is what vLLM itself would have computed on that rank.

Each byte of prefill's states is named by the weights that make it: vLLM's own loader of these weights says which
channels a rank has, and its own calculator which shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import derive_mamba_conv_split
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from pdcluster_connector.core.link import full_coverage, plan_link, require_possible
from pdcluster_connector.core.ranges import GroupSlice, plan_ranges
from pdcluster_connector.vllm.state import runs_of
from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.side_channel import RankLayout, RegionKind, RegionLayout, StateRun

Labels = npt.NDArray[np.int32]
SIZE: Final = 4
"""Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A layer as a model's configuration says it. ``weights``: sizes of the projections that the convolution sees."""

    name: str
    shapes_of: Callable[[int], tuple[tuple[int, ...], ...]]
    weights: tuple[int, ...]
    groups: int = 0
    """Of Mamba2."""
    tp_sizes: tuple[int, ...] = (1, 2, 4, 8)

    def spec(self, tp_size: int) -> MambaSpec:
        kind = MambaAttentionBackendEnum[self.name]
        return MambaSpec(16, shapes=self.shapes_of(tp_size), dtypes=(torch.float32,) * 2, mamba_type=kind)

    def layer(self) -> object:
        return SimpleNamespace(norm=SimpleNamespace(n_groups=self.groups)) if self.groups else object()

    def runs(self, tp_size: int, num_tensors: int = 1) -> tuple[tuple[StateRun, ...], ...]:
        return runs_of(self.spec(tp_size), num_tensors, tp_size, self.layer())

    def channels(self, tp_size: int, rank: int) -> Labels:
        """Which of the model's channels the rank's convolution has, as vLLM 0.32's layers load its weights."""
        copies = self.groups == 1 and tp_size > 1
        shards = [
            (size * tp_size, size * (tp_size - 1), True) if number and copies else (size, 0, False)
            for number, size in enumerate(self.weights)
        ]
        held = sum(size // tp_size for size, _, _ in shards)
        mine, whole = torch.zeros(held, dtype=torch.int32), torch.arange(sum(self.weights), dtype=torch.int32)
        mamba_v2_sharded_weight_loader(shards, tp_size, rank)(mine, whole)
        labels: Labels = mine.numpy()
        return labels

    def page(self, tp_size: int, rank: int) -> Labels:
        """A rank's state: of each number, which of the model's it is."""
        conv, state = self.spec(tp_size).shapes
        channels = self.channels(tp_size, rank)
        by_input = np.arange(min(conv), dtype=np.int32)[:, None] * 100_000 + channels
        rest = int(np.prod(state[1:]))
        heads = -1 - np.arange(rank * state[0] * rest, (rank + 1) * state[0] * rest, dtype=np.int32)
        conv_labels = by_input if get_conv_state_layout() == "SD" else by_input.T
        assert conv_labels.shape == conv
        return np.concatenate([conv_labels.ravel(), heads])

    def rank(self, tp_size: int, tp_rank: int) -> RankLayout:
        num_bytes = self.spec(tp_size).state_content_size_bytes
        place = ("s", 0, 0, 3, num_bytes + 64, num_bytes)
        (runs,) = self.runs(tp_size)
        return RankLayout(tp_rank, tp_size, (RegionLayout(*place, RegionKind.STATE, 1, 1, runs=runs),))


def delta_net(key_heads: int, value_heads: int, num_spec: int = 0) -> Kind:
    def shapes(tp_size: int) -> Any:
        return MambaStateShapeCalculator.gated_delta_net_state_shape(tp_size, key_heads, value_heads, 8, 6, 4, num_spec)

    tps = tuple(tp for tp in (1, 2, 4, 8) if key_heads % tp == 0)
    return Kind("GDN_ATTN", shapes, (key_heads * 8, key_heads * 8, value_heads * 6), tp_sizes=tps)


def mamba2(groups: int) -> Kind:
    def shapes(tp_size: int) -> Any:
        return MambaStateShapeCalculator.mamba2_state_shape(tp_size, 16 * 4, groups, 16, 4, 8, 4)

    tps = tuple(tp for tp in (1, 2, 4, 8) if groups == 1 or groups % tp == 0)
    return Kind("MAMBA2", shapes, (16 * 4, groups * 8, groups * 8), groups, tps)


def mamba1() -> Kind:
    return Kind("MAMBA1", lambda tp: MambaStateShapeCalculator.mamba1_state_shape(tp, 64, 8, 4), (64,))


KINDS: Final = {
    "delta net": delta_net(8, 16),
    "delta net of 4 key heads": delta_net(4, 8),
    "delta net with two speculative tokens": delta_net(8, 8, num_spec=2),
    "mamba2 of one group": mamba2(1),
    "mamba2 of 8 groups": mamba2(8),
    "mamba2 of 4 groups": mamba2(4),
    "mamba1": mamba1(),
}


@pytest.fixture(params=["SD", "DS"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield request.param
    get_conv_state_layout.cache_clear()


def received(kind: Kind, prefill_tp: int, decode_tp: int, rank: int) -> tuple[Labels, npt.NDArray[np.int64]]:
    """A decode rank's page after all pushes, and how often each byte was written."""
    decode = kind.rank(decode_tp, rank)
    page = np.zeros_like(kind.page(decode_tp, rank))
    target, written, coverage = page.view(np.uint8), np.zeros(page.nbytes, np.int64), Fraction(0)
    for prefill_rank in range(prefill_tp):
        prefill, source = kind.rank(prefill_tp, prefill_rank), kind.page(prefill_tp, prefill_rank).view(np.uint8)
        require_possible(prefill, "prefill")
        link = plan_link(prefill, decode)
        coverage += link.coverage
        for copy in link.copies:
            shape = link.shapes[copy.shape]
            ranges = plan_ranges(shape, GroupSlice(0, 1, (1,), (2,)))
            ours, theirs = ranges.source - shape.source.block_stride, ranges.target - 2 * shape.target.block_stride
            for start, to, length in zip(ours, theirs, ranges.num_bytes, strict=True):
                target[to : to + length] = source[start : start + length]
                written[to : to + length] += 1
    assert coverage == full_coverage(decode)
    return page, written


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("name", KINDS)
def test_every_decode_rank_gets_each_byte_of_its_state_once_for_all_tp_pairs(name: str) -> None:
    kind = KINDS[name]
    for prefill_tp, decode_tp in product(kind.tp_sizes, repeat=2):
        for rank in range(decode_tp):
            page, written = received(kind, prefill_tp, decode_tp, rank)
            assert (written == 1).all(), (prefill_tp, decode_tp, rank)
            assert np.array_equal(page, kind.page(decode_tp, rank)), (prefill_tp, decode_tp, rank)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("name", KINDS)
def test_both_parts_in_tensors_of_their_own_have_the_same_runs(name: str) -> None:
    kind = KINDS[name]
    (whole,), (conv, state) = kind.runs(2), kind.runs(2, num_tensors=2)
    assert whole[: len(conv)] == conv
    assert [run.offset for run in state] == [0]
    conv_bytes = sum(run.num_rows * run.row_bytes for run in conv)
    assert [(run.offset, run.units, run.row_bytes) for run in whole[len(conv) :]] == [
        (conv_bytes, state[0].units, state[0].row_bytes)
    ]


@pytest.mark.parametrize("layout", ["DS"], indirect=True)
@pytest.mark.parametrize("name", KINDS)
def test_runs_are_where_vllms_own_transfer_has_them(name: str, layout: str) -> None:
    assert layout == get_conv_state_layout()
    kind = KINDS[name]
    for tp_size in kind.tp_sizes:
        conv, _ = kind.runs(tp_size, num_tensors=2)
        theirs = derive_mamba_conv_split(kind.spec(tp_size), tp_size).local_conv_offsets
        assert [(run.offset, run.num_rows * run.row_bytes) for run in conv] == theirs


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        pytest.param(
            delta_net(8, 16),
            [(8, 0, 3, 448, 128), (8, 128, 3, 448, 128), (16, 256, 3, 448, 192)],
            id="q and k: 4 heads of 8 numbers; v: 8 of 6",
        ),
        pytest.param(
            mamba2(8),
            [(16, 0, 3, 384, 128), (8, 128, 3, 384, 128), (8, 256, 3, 384, 128)],
            id="x: 8 heads of 4 numbers; B and C: 4 groups of 8",
        ),
        pytest.param(
            mamba2(1),
            [(16, 0, 3, 192, 128), (1, 128, 3, 192, 32), (1, 160, 3, 192, 32)],
            id="one group, on both ranks",
        ),
    ],
)
def test_known_runs_at_tp_2(kind: Kind, runs: list[tuple[int, ...]]) -> None:
    conv, _ = kind.runs(2, num_tensors=2)
    assert list(conv) == [StateRun(*run) for run in runs]


def test_what_vllm_does_not_say_has_no_runs_and_is_refused_with_both_tp_sizes() -> None:
    """One group for each of two ranks: of a model with one group, or with two?"""
    assert runs_of(mamba2(1).spec(2), 1, 2, object()) == ((),)
    assert runs_of(mamba2(2).spec(2), 2, 2, object()) == ((), ())
    short = MambaSpec(16, shapes=((3, 32),), dtypes=(torch.float32,), mamba_type=MambaAttentionBackendEnum.SHORT_CONV)
    assert runs_of(short, 1, 2, object()) == ((),)
    place = ("s", 0, 0, 3, 64, 64, RegionKind.STATE, 1, 1)
    ours, theirs = (RankLayout(0, tp_size, (RegionLayout(*place),)) for tp_size in (1, 2))
    with pytest.raises(
        ProtocolError, match="a state whose split is not known, with TP 1 on prefill, 2 on decode: give"
    ):
        plan_link(ours, theirs)


def test_groups_of_another_number_are_refused_with_both() -> None:
    with pytest.raises(ProtocolError, match=r"\(8, 32, 3\).*on prefill, .*\(4, 32, 3\).*on decode: serve one model"):
        plan_link(mamba2(8).rank(2, 0), mamba2(4).rank(1, 0))


def test_other_speculative_tokens_are_refused_with_both() -> None:
    with pytest.raises(ProtocolError, match="with the same --speculative-config"):
        plan_link(delta_net(8, 8).rank(2, 0), delta_net(8, 8, num_spec=2).rank(1, 0))
