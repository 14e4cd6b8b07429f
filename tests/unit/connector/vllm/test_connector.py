"""What the facade does to vLLM's own objects."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
from msgspec.structs import replace
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from pdcluster_connector.core.watermark import KvGroup
from pdcluster_connector.failures import take_counts
from pdcluster_connector.scheduler.decode import DecodeScheduler
from pdcluster_connector.scheduler.prefill import PrefillEngine, PrefillScheduler
from pdcluster_connector.settings import PushTiming
from pdcluster_connector.steps import DecodeStep, PrefillStep
from pdcluster_connector.vllm.block_tables import BlockTables
from pdcluster_connector.vllm.connector import PDClusterConnector
from pdcluster_connector.vllm.decode_hooks import DecodeSchedulerHooks, DecodeWorkerHooks
from pdcluster_connector.vllm.hooks import SchedulerHooks, StepMetadata, WorkerHooks
from pdcluster_connector.vllm.load_errors import PushedBlocks
from pdcluster_connector.vllm.prefill_hooks import PrefillSchedulerHooks, leave_out_last_token
from pdcluster_connector.vllm.transfer_spans import TransferSpans
from pdcluster_connector.worker.receiver import Receipts
from pdcluster_protocol.ids import BootId, RequestId
from pdcluster_protocol.launch import CONNECTOR, CONNECTOR_MODULE
from pdcluster_protocol.params import sealed, to_wire
from pdcluster_protocol.prompt_digest import digest_prompt
from unit.connector.scheduler.test_decode import waiting_bench
from unit.connector.scheduler.test_first_steps import bench_with as first_steps_bench
from unit.connector.scheduler.test_prefill import SECRET, TOKENS, reservation


def request_of(tokens: list[int]) -> Request:
    """As vLLM's scheduler adds it."""
    return Request("r", tokens, SamplingParams(max_tokens=1), None)


def connector_with(scheduler: SchedulerHooks | None = None, worker: WorkerHooks | None = None) -> PDClusterConnector:
    """A connector without the vLLM configuration that it is made from."""
    made = PDClusterConnector.__new__(PDClusterConnector)
    made._scheduler_hooks, made._worker_hooks, made._adapters = (
        scheduler or SchedulerHooks(),
        worker or WorkerHooks(),
        None,
    )
    return made


def prefill_connector() -> PDClusterConnector:
    """That of a prefill engine's scheduler process."""
    scheduler = PrefillScheduler(PrefillEngine(1, (2,), (KvGroup(16),)), PushTiming.LAYERWISE, SECRET, BootId("life"))
    return connector_with(PrefillSchedulerHooks(scheduler, BlockTables().follow, None, keeps_last_token=False))


def test_prefill_of_a_stateful_model_leaves_the_last_token_to_decode() -> None:
    request = request_of([5, 6, 7])
    leave_out_last_token(request)
    assert request.prompt_token_ids == [5, 6]
    assert list(request.all_token_ids) == [5, 6]
    assert request.num_prompt_tokens == request.num_tokens == 2


def test_a_prompt_of_one_token_stays_as_it_is() -> None:
    request = request_of([5])
    leave_out_last_token(request)
    assert request.prompt_token_ids == list(request.all_token_ids) == [5]
    assert request.num_prompt_tokens == 1


def test_a_prompt_of_embeddings_stays_as_it_is() -> None:
    request = Request("r", None, SamplingParams(max_tokens=1), None, prompt_embeds=torch.zeros(3, 8))
    leave_out_last_token(request)
    assert request.prompt_token_ids is None
    assert request.num_prompt_tokens == request.num_tokens == 3


@pytest.mark.parametrize("theirs", ["cat", "dog"])
def test_prefill_pushes_for_the_very_images_that_decode_has(theirs: str) -> None:
    connector = prefill_connector()
    ours = MultiModalFeatureSpec(None, "image", "cat", PlaceholderRange(1, 3))
    request = Request("r", TOKENS, SamplingParams(max_tokens=1), None, mm_features=[ours])
    wanted = replace(reservation(), prompt_digest=digest_prompt(TOKENS, [f"1 3 {theirs}"]))
    request.kv_transfer_params = to_wire(sealed(wanted, SECRET))
    connector.on_new_request(request)
    _, answer = connector.request_finished(request, [])
    assert ("other tokens or images" in str(answer)) == (theirs == "dog")
    assert (answer is None) == (theirs == "cat")


def test_transfer_parameters_that_are_no_object_end_their_request_and_not_the_engine() -> None:
    """vLLM takes them through vllm_xargs, and looks keys up in them after us."""
    connector, request = prefill_connector(), request_of([5, 6, 7])
    request.kv_transfer_params = "text"
    connector.on_new_request(request)
    assert request.kv_transfer_params.get("do_remote_prefill") is None
    _, answer = connector.request_finished(request, [])
    assert answer is not None
    assert "kv_transfer_params have version None" in str(answer["pdcluster_reason"])


def pushed_request(connector: PDClusterConnector) -> Request:
    """Request "r", for which decode has reserved blocks."""
    request = request_of(TOKENS)
    request.kv_transfer_params = to_wire(sealed(reservation(), SECRET))
    connector.on_new_request(request)
    return request


def preempted_at(connector: PDClusterConnector, told: set[str] | None) -> tuple[RequestId, ...]:
    """What the workers hear of a step without tokens, of which vLLM tells ``told``."""
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nothing,
        num_scheduled_tokens={},
        finished_req_ids=set(),
        preempted_req_ids=told,
    )
    step = connector.build_connector_meta(output).step
    assert isinstance(step, PrefillStep)
    return step.preempted


def test_a_preemption_of_which_vllm_does_not_tell_is_told_to_the_workers_once() -> None:
    """Before vLLM 0.26 ``reset_prefix_cache`` with running requests takes their blocks, and names none."""
    connector = prefill_connector()
    request = pushed_request(connector)
    assert preempted_at(connector, set()) == ()
    request.num_preemptions += 1
    assert preempted_at(connector, None) == ("r",)
    assert preempted_at(connector, set()) == ()


@pytest.mark.parametrize("counted", [0, 1])
def test_a_preemption_of_which_vllm_tells_is_told_once_too(counted: int) -> None:
    connector = prefill_connector()
    request = pushed_request(connector)
    request.num_preemptions += counted
    assert preempted_at(connector, {"r"}) == ("r",)
    assert preempted_at(connector, set()) == ()


def times_told(params: object, *, is_scheduled: bool = True) -> dict[str, object] | None:
    """What the answer says of a request that came at 1 s, was first computed at 3 s and ended at 3.5 s."""
    hooks, request = prefill_connector()._scheduler_hooks, request_of(TOKENS)
    request.kv_transfer_params = params
    if isinstance(params, dict):
        hooks.add(request, params, 1.0)
    new = SimpleNamespace(req_id="r", block_ids=([0],), num_computed_tokens=0)
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=nothing,
        num_scheduled_tokens={"r": len(TOKENS)},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
    for now in (3.0, 3.2) if is_scheduled else ():
        hooks.step(output, now)
    _, said = hooks.finish(RequestId("r"), 3.5)
    assert hooks.finish(RequestId("r"), 4.0)[1] is None
    return said


TIMES: Final = {"pdcluster_queued_s": 2.0, "pdcluster_computed_s": 0.5}


def test_prefill_tells_how_long_a_request_waited_and_was_computed() -> None:
    assert times_told(to_wire(sealed(reservation(), SECRET))) == TIMES
    assert times_told(to_wire(sealed(reservation(), SECRET)), is_scheduled=False) is None
    assert times_told({}) is None
    refused = times_told({"do_remote_decode": True})
    assert refused is not None
    assert refused == {"pdcluster_reason": refused["pdcluster_reason"], **TIMES}


def test_a_request_that_has_ended_is_not_looked_at_again() -> None:
    connector = prefill_connector()
    connector.request_finished(pushed_request(connector), [])
    assert isinstance(connector._scheduler_hooks, PrefillSchedulerHooks)
    assert connector._scheduler_hooks._preemptions._counted == {}


def decode_connector(requests: DecodeScheduler, blocks: PushedBlocks | None = None) -> PDClusterConnector:
    """That of a decode engine's scheduler process."""
    half: Any = SimpleNamespace(requests=requests)
    return connector_with(DecodeSchedulerHooks(half, blocks, None))


def decode_connector_with_a_reservation(blocks: PushedBlocks | None = None) -> PDClusterConnector:
    """Request "r" waits for 40 tokens and owes a receipt."""
    return decode_connector(waiting_bench(wants_receipt=True).scheduler, blocks)


@pytest.mark.parametrize(("failed", "num_tokens"), [(set(), 40), ({"r"}, 0)])
def test_what_failed_to_come_is_in_no_receipt(failed: set[str], num_tokens: int) -> None:
    connector = decode_connector_with_a_reservation()
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving=failed))
    _, answer = connector.request_finished(request_of(list(range(40))), [])
    assert answer is not None
    assert answer["pdcluster_received_tokens"] == num_tokens


@pytest.mark.parametrize(("invalid", "num_tokens"), [(set(), 40), ({7}, 40), ({2}, 0)])
def test_vllm_before_0_30_names_what_failed_by_its_blocks(invalid: set[int], num_tokens: int) -> None:
    blocks = PushedBlocks(16)
    connector = decode_connector_with_a_reservation(blocks)
    blocks.reserve(RequestId("r"), (1, 2, 3), 0)
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids=invalid))
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    _, answer = connector.request_finished(request_of(list(range(40))), [])
    assert answer is not None
    assert answer["pdcluster_received_tokens"] == num_tokens
    assert blocks.failed({1, 2, 3}) == set()


class OneReceipt:
    """A decode rank's worker: "r" has failed, "s" has come, and a request runs with the wrong adapter."""

    foreign = frozenset[int]()

    def begin_step(self, step: DecodeStep) -> None:
        """Nothing is expected."""

    def receipts(self) -> Receipts:
        return Receipts({RequestId("r"), RequestId("s")}, {RequestId("r")})

    def foreign_blocks(self) -> set[int]:
        return set(self.foreign)


def test_a_worker_names_the_blocks_of_what_failed_to_vllm_before_0_30() -> None:
    worker = OneReceipt()
    hooks = DecodeWorkerHooks(cast("Any", SimpleNamespace(worker=worker, address=None)), (16,), TransferSpans("d", 0))
    connector = connector_with(worker=hooks)
    hooks.begin_step(StepMetadata(DecodeStep(), {RequestId("r"): (4, 5), RequestId("s"): (6,)}))
    assert connector.get_finished(set()) == (set(), {"r", "s"})
    assert connector.get_block_ids_with_load_errors() == {4, 5}
    assert connector.get_block_ids_with_load_errors() == set()
    worker.foreign = frozenset((9,))
    assert connector.get_block_ids_with_load_errors() == {9}


def test_a_worker_hears_of_the_first_step_of_a_request_with_an_adapter() -> None:
    connector = decode_connector(first_steps_bench().scheduler)
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    output: Any = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id="other"), SimpleNamespace(req_id="r")])
    step = connector.build_connector_meta(output).step
    assert isinstance(step, DecodeStep)
    assert [first.request_id for first in step.first_steps] == ["r"]
    take_counts()
    connector.update_connector_output(KVConnectorOutput(invalid_block_ids={step.first_steps[0].block}))
    assert take_counts()["adapter_mixed"] == 1, "vLLM has not ended it"


def test_decode_keeps_its_whole_graphs() -> None:
    """vLLM would otherwise take them from every engine that has the connector."""
    assert not PDClusterConnector.requires_piecewise_for_cudagraph({})


def test_vllm_is_told_that_kv_must_not_be_remapped() -> None:
    assert not PDClusterConnector.supports_sleep_mode({})


def test_the_plugin_names_this_very_class() -> None:
    assert getattr(import_module(CONNECTOR_MODULE), CONNECTOR) is PDClusterConnector
