"""The two hashes that name a workload: what both roles must share, and what one role's pods look like.

Prefill and decode engines are paired within one revision only, so whatever makes KV of one engine mean something else
in another, or a prompt other tokens, belongs to the revision; TP and all else belongs to the template of its role. A
change of a template restarts that role only.

Both are stable across runs, machines and key order, and an absent field equals a null one: a new optional field of the
API moves no hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from pdcluster_operator.api.engine_args import MAY_DIFFER, MUST_AGREE
from pdcluster_protocol.labels import Role

Json = None | bool | int | float | str | list["Json"] | Mapping[str, "Json"]

SHARED_ARGS: Final = frozenset({*MUST_AGREE, *MAY_DIFFER, "revision"})
"""vLLM 0.32 engine arguments, as on its command line without dashes in front, that both roles must share."""

_DIGITS: Final = 8
"""32 bits: a cluster has a handful of revisions at a time."""


def revision_of(
    *,
    model: Mapping[str, Json],
    image: str,
    transfer: Mapping[str, Json],
    engine_args: Mapping[Role, Mapping[str, Json]],
) -> str:
    """8 lower-case hex digits over what prefill and decode must share."""
    shared: dict[str, Json] = {role.value: shared_args(args) for role, args in engine_args.items()}
    return _digest({"model": model, "image": image, "transfer": transfer, "engineArgs": shared})


def template_of(pod_template: Mapping[str, Json]) -> str:
    """8 lower-case hex digits over one role's pod template as it is rendered, before its hash is a label of it."""
    return _digest(pod_template)


def shared_args(engine_args: Mapping[str, Json]) -> dict[str, Json]:
    """Those of ``SHARED_ARGS``, in any spelling: ``--block-size``, ``block_size``, ``no-enable-prefix-caching``."""
    spelled = {name.removeprefix("--").replace("_", "-"): value for name, value in engine_args.items()}
    return {name: value for name, value in spelled.items() if _is_shared(name)}


def _is_shared(name: str) -> bool:
    # vLLM takes nested arguments as `--speculative-config.method`, and turns switches off with `--no-`.
    return name.removeprefix("no-").partition(".")[0] in SHARED_ARGS


def _digest(value: Json) -> str:
    text = json.dumps(_without_nulls(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _without_nulls(value: Json) -> Json:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
