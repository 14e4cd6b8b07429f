"""How vLLM shards the recurrent state of a layer over TP ranks, read from the shapes that its spec says.

    gated delta net   convolution over q | k | v, each by its heads;     state [v heads, v size, k size]
    Mamba2            convolution over x | B | C: heads, groups, groups; state [heads, head size, state size]
    Mamba1            convolution over x, by channels;                   state [channels, state size]

A convolution keeps ``width - 1`` inputs of each channel, and one more for each speculative token: in layout SD
``[inputs, channels]``, in DS ``[channels, inputs]``. Any other kind of state has no runs, and goes between equal TP
sizes only.

Source of truth: vLLM 0.32 ``model_executor/layers/mamba/mamba_utils.py`` and ``mamba_mixer2.py``; a test pins both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import MambaSpec

from pdcluster_protocol.side_channel import StateRun

_NUM_PARTS: Final = 2
"""A convolution and a state. Kinds with more (ReplaySSM's rings) are not known here."""


@dataclass(frozen=True, slots=True)
class _Projection:
    """A part of the convolution: ``units`` in the whole model, ``channels`` in this rank."""

    units: int
    channels: int


def runs_of(spec: MambaSpec, num_tensors: int, tp_size: int, layer: object) -> tuple[tuple[StateRun, ...], ...]:
    """The runs of each tensor of a layer of ``spec``, which has one tensor for its whole state or one for each part.

    ``layer``: vLLM's own object of the layer.
    """
    # vLLM's Mamba2 layers have a norm with ``n_groups``. The layer's own ``n_groups`` also counts copies of groups.
    num_groups = getattr(getattr(layer, "norm", None), "n_groups", None)
    parts = state_runs(spec, tp_size, num_groups)
    if num_tensors == len(parts):
        return parts
    conv, state = parts if all(parts) else ((), ())
    conv_bytes = sum(run.num_rows * run.row_bytes for run in conv)
    return ((*conv, *(msgspec.structs.replace(run, offset=run.offset + conv_bytes) for run in state)),)


def state_runs(spec: MambaSpec, tp_size: int, num_groups: int | None) -> tuple[tuple[StateRun, ...], ...]:
    """The runs of each part of the state, counted from the part's first byte; none where the split is not known.

    ``num_groups``: of a Mamba2 layer in the whole model; None: the layer does not say. Only the layer tells: vLLM gives
    each rank one group both in a model with one group and in a model with one for each rank.
    """
    unknown: tuple[tuple[StateRun, ...], ...] = tuple(() for _ in spec.shapes)
    if len(spec.shapes) != _NUM_PARTS:
        return unknown
    conv, state = spec.shapes
    inputs, channels = conv if get_conv_state_layout() == "SD" else conv[::-1]
    projections = _projections(spec, channels, tp_size, num_groups)
    if sum(one.channels for one in projections) != channels:
        return unknown
    conv_size, state_size = (dtype.itemsize for dtype in spec.dtypes)
    state_bytes = prod(state) * state_size
    heads = StateRun(state[0] * tp_size, 0, 1, state_bytes, state_bytes)
    return tuple(_conv_runs(projections, inputs, conv_size)), (heads,)


def _projections(spec: MambaSpec, channels: int, tp_size: int, num_groups: int | None) -> tuple[_Projection, ...]:
    """The projections of the convolution, in order; empty: they are not known."""
    kind, state = spec.mamba_type.name, spec.shapes[1]
    if kind == "MAMBA1":
        return (_Projection(state[0] * tp_size, state[0]),)
    if kind not in ("GDN_ATTN", "MAMBA2"):
        return ()
    heads, head_size, size = state
    main = _Projection(heads * tp_size, heads * head_size)
    each = (channels - main.channels) // 2
    if each < size or each % size:
        return ()
    if kind == "GDN_ATTN":
        key = _Projection(each // size * tp_size, each)
        return key, key, main
    groups = _num_groups(each // size, tp_size, num_groups)
    group = _Projection(groups, each)
    return (main, group, group) if groups else ()


def _num_groups(local: int, tp_size: int, said: int | None) -> int:
    """Groups in the whole model, of which this rank holds ``local``; 0 where that is not known."""
    if local > 1 or tp_size == 1:
        return local * tp_size
    return said if said in (1, tp_size) else 0


def _conv_runs(projections: Sequence[_Projection], inputs: int, size: int) -> Iterator[StateRun]:
    is_by_input = get_conv_state_layout() == "SD"
    row, before = sum(one.channels for one in projections) * size, 0
    for one in projections:
        length = one.channels * size
        if is_by_input:
            yield StateRun(one.units, before, inputs, row, length)
        else:
            yield StateRun(one.units, before * inputs, 1, length * inputs, length * inputs)
        before += length
