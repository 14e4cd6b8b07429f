"""The two hashes that name a workload: one over what both roles must share, one over the pods of one role.

Prefill and decode engines are paired within one revision only. So an option belongs to the revision if it changes the
meaning of KV, or the tokens of a prompt. TP and all other options belong to the template of their role. A change of a
template restarts that role only.

Both hashes are stable across runs, machines and key order. An absent field equals a null one, so a new optional field
of the API changes no hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from pdcluster_operator.api.engine_args import MAY_DIFFER, MUST_AGREE
from pdcluster_protocol.labels import Role

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]

SHARED_ARGS: Final = frozenset({*MUST_AGREE, *MAY_DIFFER})
"""Arguments of vLLM 0.32 that belong to the revision, as on its command line without the dashes in front."""
SHARED_ENV: Final = frozenset(
    {
        "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_MLA_DISABLE",
        "VLLM_SSM_CONV_STATE_LAYOUT",
    }
)
"""Variables that change how vLLM 0.32 keeps KV (``envs.py``). The roles may have different values: one role may need to
be told a layout that the other role has by default. The handshake decides whether the roles fit."""

_DIGITS: Final = 8
"""32 bits are enough: a cluster has a handful of revisions at a time."""


def revision_of(
    *,
    model: Mapping[str, Json],
    image: str,
    transfer: Mapping[str, Json],
    engine_args: Mapping[Role, Mapping[str, Json]],
    env: Mapping[Role, Mapping[str, Json]],
    tls: Mapping[str, Json] | None = None,
) -> str:
    """8 lower-case hex digits over what prefill and decode must share. ``env``: variables by name. ``tls``:
    ``spec.tls``, by which routers speak TLS with both roles; None: they speak plain HTTP."""
    args: Json = {role.value: _those_of(SHARED_ARGS, given) for role, given in engine_args.items()}
    # Null, which hashes like an absent field, if no role sets such a variable.
    found = {role.value: those for role, given in env.items() if (those := _those_of(SHARED_ENV, given))}
    kv: dict[str, Json] = {"model": model, "image": image, "transfer": transfer, "engineArgs": args}
    return _digest({**kv, "env": found or None, "tls": tls})


def template_of(pod_template: Mapping[str, Json]) -> str:
    """8 lower-case hex digits over one role's rendered pod templates, before the digits become a label of the pods."""
    return _digest(pod_template)


def _those_of(names: frozenset[str], given: Mapping[str, Json]) -> dict[str, Json]:
    """The given options that have one of these names. The API takes one spelling only (``api/engine_args.py``)."""
    return {name: value for name, value in given.items() if name in names}


def _digest(value: Json) -> str:
    text = json.dumps(_without_nulls(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _without_nulls(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
