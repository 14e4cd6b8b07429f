"""Any value of a message type, drawn from the types of its fields. Integers stay within 64 bits, as on the wire."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from hypothesis import strategies as st

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
    }
    kind = getattr(kind, "__supertype__", kind)
    if kind in plain:
        return plain[kind]
    if get_origin(kind) is tuple:
        return st.lists(_any_value(get_args(kind)[0]), max_size=3).map(tuple)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return any_message(kind)
