"""Any value of a message type, drawn from the types of its fields. Numbers stay within their bounds."""

from __future__ import annotations

from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from pdcluster_protocol.bounds import bounds_of
from pdcluster_protocol.fingerprint import KvFingerprint

M = TypeVar("M", bound=msgspec.Struct)

FINGERPRINT = KvFingerprint(
    model_digest="m-1",
    kv_dtype="float32",
    layout="LBHNC",
    kv_heads=(2,),
    attention_backend="CPU_ATTN",
    vllm_version="0.32.0",
    connector_version="0.1.0",
)


def any_message(kind: type[M], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[M]:
    """Messages of ``kind``; ``given`` says what some fields hold."""
    drawn = {field.name: _any_value(field.type) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **{**drawn, **given})


def _any_value(kind: Any) -> st.SearchStrategy[Any]:
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=20),
        int: st.integers(-(1 << 63), (1 << 63) - 1),
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    if isinstance(kind, UnionType) or get_origin(kind) is Union:
        kinds = [one for one in get_args(kind) if one is not msgspec.UnsetType]
        return st.one_of([st.none() if one is NoneType else _any_value(one) for one in kinds])
    if get_origin(kind) is Annotated and (bounds := bounds_of(kind)):
        if bounds.max_length is not None:
            return _any_value(kind.__origin__)
        if kind.__origin__ is float:
            return st.floats(bounds.ge, bounds.le)
        return st.integers(int(bounds.ge or 0), (1 << 64) - 1 if bounds.le is None else int(bounds.le))
    kind = getattr(kind, "__supertype__", kind)
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is tuple:
        return _any_tuple(kind)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return any_message(kind)


def _any_tuple(kind: Any) -> st.SearchStrategy[Any]:
    first, *others = get_args(kind)
    if others == [...]:
        return st.lists(_any_value(first), max_size=3).map(tuple)
    return st.tuples(*map(_any_value, (first, *others)))
