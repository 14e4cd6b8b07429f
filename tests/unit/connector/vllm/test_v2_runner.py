"""Where the V2 runner writes into blocks of a preempted request, lanes have been asked to leave them before."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from pdcluster_connector.steps import PrefillStep
from pdcluster_connector.vllm.hooks import StepMetadata
from pdcluster_connector.vllm.prefill_hooks import PrefillWorkerHooks
from pdcluster_connector.vllm.transfer_spans import TransferSpans
from pdcluster_connector.vllm.v2_runner import ask_before_writes, ask_no_more
from pdcluster_protocol.ids import BootId, RequestId
from unit.connector.vllm.test_connector import connector_with

STEP = StepMetadata(PrefillStep(BootId("life"), (), (RequestId("r"),)))


class Runner:
    """Counts what happens in the order in which it happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[object] = []
        monkeypatch.setattr(GPUModelRunner, "update_requests", lambda _, output: self.events.append(output))

    def step(self, metadata: object) -> SimpleNamespace:
        output = SimpleNamespace(kv_connector_metadata=metadata)
        GPUModelRunner.update_requests(cast("Any", self), cast("Any", output))
        return output


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    made = Runner(monkeypatch)
    yield made
    ask_no_more(made.events.append)


def test_we_are_asked_before_the_runner_writes_and_not_after_our_end(runner: Runner) -> None:
    protect = runner.events.append
    ask_before_writes(protect)
    output = runner.step(STEP)
    assert runner.events == [STEP, output]
    ask_no_more(protect)
    after = runner.step(STEP)
    assert runner.events == [STEP, output, after]


def test_a_second_rank_stands_around_nothing_twice_and_a_step_without_metadata_is_none_of_ours(runner: Runner) -> None:
    other: list[object] = []
    ask_before_writes(runner.events.append)
    ask_before_writes(other.append)
    output = runner.step(None)
    assert (runner.events, other) == ([output], [])
    runner.step(STEP)
    assert other == [STEP]
    assert runner.events.count(STEP) == 1
    ask_no_more(other.append)


def test_among_other_connectors_we_are_asked_too(runner: Runner) -> None:
    """vLLM's ``MultiConnector`` puts the metadata of all into one."""
    protect, theirs = runner.events.append, StepMetadata(PrefillStep(BootId("life"), (), ()))
    ask_before_writes(protect)
    among = MultiKVConnectorMetadata((theirs, STEP))
    output = runner.step(among)
    assert runner.events == [among, theirs, STEP, output]
    ask_no_more(protect)


def test_the_requests_of_a_step_are_protected_once() -> None:
    protected: list[object] = []
    rank: Any = SimpleNamespace(worker=SimpleNamespace(protect_preempted=protected.append))
    connector = connector_with(worker=PrefillWorkerHooks(rank, TransferSpans("p", 0)))
    another = StepMetadata(PrefillStep(BootId("life"), (), (RequestId("r"),)))
    for metadata in (STEP, MultiKVConnectorMetadata((STEP,)), STEP, KVConnectorMetadata(), another):
        connector.handle_preemptions(metadata)
    assert protected == [("r",), ("r",)]


def test_the_installed_runners_step_begins_with_nothing_that_zeroes_or_copies_blocks() -> None:
    tree = ast.parse(inspect.getsource(model_runner))
    (runner,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "GPUModelRunner")
    methods = {one.name: one for one in runner.body if isinstance(one, ast.FunctionDef)}
    calls = sorted(filter(_is_own_call, ast.walk(methods["execute_model"])), key=lambda one: cast("Any", one).lineno)
    called = [_name_of(cast("ast.Call", one).func) for one in calls]
    before = called[: called.index("update_requests")]
    writers = {"zero_block_ids", "copy_kv_cache_blocks_inplace", "preprocess_state"}
    assert set(before) <= {"update_pp_decode_requests", "finish_requests", "free_states", "add_requests"}
    for name in before:
        assert not writers & {_name_of(one.func) for one in ast.walk(methods[name]) if isinstance(one, ast.Call)}
    assert writers & {_name_of(one.func) for one in ast.walk(methods["update_requests"]) if isinstance(one, ast.Call)}


def _is_own_call(node: ast.AST) -> bool:
    """Whether it is ``self.method(...)``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    )


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
