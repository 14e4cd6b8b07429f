"""vLLM's V2 model runner, which writes into blocks before it says whose they were.

    execute_model   update_requests      zeroes new blocks, copies shared ones: maybe blocks of a preempted request
                    ...
                    pre_forward          handle_preemptions: too late, a lane may have read what was written

So this module stands around ``GPUModelRunner.update_requests`` (vLLM 0.23 to 0.33 ``v1/worker/gpu/model_runner.py``).
The V1 runner asks first, and needs nothing. All calls come from the worker's forward thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Final, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata

if TYPE_CHECKING:  # its import costs seconds where the V1 runner runs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

_Protect: TypeAlias = Callable[[KVConnectorMetadata], None]
"""Gets the metadata of a step."""
_Update: TypeAlias = "Callable[[GPUModelRunner, SchedulerOutput], None]"

_MODULE: Final = "vllm.v1.worker.gpu.model_runner"
_METHOD: Final = "update_requests"

_OURS: Final[list[_Update]] = []
"""The method that stands around vLLM's, once it does."""
_PROTECTORS: Final[list[_Protect]] = []
"""One for each prefill rank of this process: one, and several in tests."""


def ask_before_writes(protect: _Protect) -> None:
    """``protect`` gets the connector's metadata of each step before the V2 runner writes. Ends with ``ask_no_more``.

    It does nothing if the V1 runner runs. Call it once the runner has been made.
    """
    if _MODULE not in sys.modules:
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner  # it is there already

    if GPUModelRunner.update_requests not in _OURS:
        _OURS[:] = [_after_protection(GPUModelRunner.update_requests)]
        setattr(GPUModelRunner, _METHOD, _OURS[0])
    _PROTECTORS.append(protect)


def ask_no_more(protect: _Protect) -> None:
    _PROTECTORS[:] = [one for one in _PROTECTORS if one != protect]


def _after_protection(inner: _Update) -> _Update:
    @wraps(inner)
    def update_requests(runner: GPUModelRunner, scheduler_output: SchedulerOutput) -> None:
        for metadata in _parts_of(scheduler_output.kv_connector_metadata):
            for protect in _PROTECTORS:
                protect(metadata)
        inner(runner, scheduler_output)

    return update_requests


def _parts_of(metadata: KVConnectorMetadata | None) -> Iterator[KVConnectorMetadata]:
    """The metadata of each connector: of one, or of all that are in a ``MultiConnector`` (vLLM 0.32
    ``kv_connector/v1/multi_connector.py``, ``MultiKVConnectorMetadata.metadata``)."""
    if metadata is None:
        return
    yield metadata
    if isinstance(metadata, MultiKVConnectorMetadata):
        for part in metadata.metadata:
            yield from _parts_of(part)
