"""The part of ``docs/support.md`` on vLLM's versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from versions.surface import recorded
from versions.table import NEWEST_ON_CPU, VERSIONS, Version

_ENGINES: Final = "vLLM engines on a CPU, `make versions`"
_READ: Final = "reading: `tests/contract/test_vllm_touched.py` finds every attribute and parameter in its wheel"
_BEFORE_0_24: Final = "decode that runs several steps at once (`--async-scheduling`, pipeline stages)"
_BEFORE_0_26: Final = "a sliding window on decode that runs several steps at once"
_BEFORE_0_30: Final = "several KV groups; recurrent state; a sliding window with `kv_load_failure_policy: recompute`"


def section() -> Iterator[str]:
    """Lines: one row for each minor version that is supported."""
    yield from ("## Versions of vLLM", "")
    yield "Prefill and decode must be of the same one. A refusal ends the engine's start and names the cure."
    yield from ("", "| vLLM | proven by | models | refused |", "|---|---|---|---|")
    proven = {version.vllm: version for version in VERSIONS}
    for name in recorded():
        yield _row(name, proven.get(name))
    yield ""


def _row(name: str, version: Version | None) -> str:
    refused = _refused(int(name.split(".")[1]))
    if name == NEWEST_ON_CPU:
        return f"| {name} | vLLM engines on a CPU, every test | all on this page | {refused} |"
    if version is None:
        return f"| {name} | {_READ} | | {refused} |"
    return f"| {name} | {_ENGINES} | Llama; {'; '.join(version.models)} | {refused} |"


def _refused(minor: int) -> str:
    steps = _BEFORE_0_24 if minor < 24 else _BEFORE_0_26 if minor < 26 else ""
    return "; ".join(filter(None, [_BEFORE_0_30 if minor < 30 else "", steps]))
