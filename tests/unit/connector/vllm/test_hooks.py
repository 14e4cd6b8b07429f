"""The facade hands each call of vLLM over to the hooks of its process, and ends what they hold."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
import torch
from vllm.v1.outputs import KVConnectorOutput

from pdcluster_connector.core.reception import Lost
from pdcluster_connector.steps import DecodeStep, PrefillStep
from pdcluster_connector.vllm.block_tables import resolved
from pdcluster_connector.vllm.connector import PDClusterConnector
from pdcluster_connector.vllm.decode_hooks import DecodeSchedulerHooks, DecodeWorkerHooks
from pdcluster_connector.vllm.hooks import Listening, LostAttempts, SchedulerHooks, StepMetadata, WorkerHooks
from pdcluster_connector.vllm.prefill_hooks import PrefillSchedulerHooks, PrefillWorkerHooks
from pdcluster_connector.vllm.transfer_spans import TransferSpans
from pdcluster_connector.vllm.v2_runner import _PROTECTORS
from pdcluster_connector.worker.receiver import Receipts
from pdcluster_protocol.ids import Attempt, BootId, RequestId
from pdcluster_protocol.params import SideChannelAddress
from unit.connector.vllm.test_connector import connector_with, request_of

REQUEST: Final = request_of([1, 2, 3])
STEP: Final = StepMetadata(PrefillStep(BootId("life")))
LOST: Final = Lost(RequestId("r"), Attempt(1), "why")
LISTENING: Final = Listening(SideChannelAddress("host", 1, BootId("life")), (16,))
OUTPUT: Final = KVConnectorOutput()
SCHEDULED: Final = cast("Any", object())
TOKEN_BLOCKS: Final = cast("Any", object())


class Noting(SchedulerHooks, WorkerHooks):
    """Notes each call and its arguments without the time, and has an answer for each."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.listening = LISTENING

    def add(self, *args: object) -> None:
        self.calls.append(("add", *args[:-1]))

    def refuse(self, *args: object) -> None:
        self.calls.append(("refuse", *args[:-1]))

    def external_tokens(self, *args: object) -> int:
        self.calls.append(("external_tokens", *args))
        return 2

    def reserve(self, *args: object) -> None:
        self.calls.append(("reserve", *args[:-1]))

    def step(self, *args: object) -> StepMetadata:
        self.calls.append(("step", *args[:-1]))
        return STEP

    def workers_said(self, *args: object) -> None:
        self.calls.append(("workers_said", *args[:-1]))

    def finish(self, request_id: RequestId, now: float) -> tuple[bool, dict[str, object] | None]:
        self.calls.append(("finish", request_id))
        return True, {"a": 1}

    def protect_preempted(self, *args: object) -> None:
        self.calls.append(("protect_preempted", *args))

    def begin_step(self, *args: object) -> None:
        self.calls.append(("begin_step", *args))

    def layer_saved(self, *args: object) -> None:
        self.calls.append(("layer_saved", *args))

    def end_step(self) -> None:
        self.calls.append(("end_step",))

    def sent(self, finished: set[str]) -> set[RequestId]:
        self.calls.append(("sent", finished))
        return {RequestId("sent")}

    def receipts(self) -> Receipts:
        return Receipts({RequestId("came"), RequestId("failed")}, {RequestId("failed")})

    def load_errors(self) -> set[int]:
        return {7}

    def losses(self) -> tuple[Lost, ...]:
        return (LOST,)


def asked(params: object) -> Any:
    return SimpleNamespace(request_id="r", kv_transfer_params=params)


OBJECT, TEXT = asked({"a": 1}), asked("text")
ENDED: Final = {"sent"}, {"came", "failed"}
CALLS: Final[dict[str, tuple[Callable[[PDClusterConnector], object], object, list[tuple[object, ...]]]]] = {
    "a new request": (lambda it: it.on_new_request(OBJECT), None, [("add", OBJECT, {"a": 1})]),
    "one without parameters": (lambda it: it.on_new_request(asked(None)), None, []),
    "one whose parameters are no object": (lambda it: it.on_new_request(TEXT), None, [("refuse", TEXT, "text")]),
    "matched tokens": (
        lambda it: it.get_num_new_matched_tokens(cast("Any", REQUEST), 1),
        (2, True),
        [("external_tokens", "r", 1)],
    ),
    "allocated blocks": (
        lambda it: it.update_state_after_alloc(cast("Any", REQUEST), TOKEN_BLOCKS, 2),
        None,
        [("reserve", REQUEST, TOKEN_BLOCKS, 2)],
    ),
    "a step": (lambda it: it.build_connector_meta(SCHEDULED), STEP, [("step", SCHEDULED)]),
    "the workers' news": (lambda it: it.update_connector_output(OUTPUT), None, [("workers_said", OUTPUT)]),
    "an end": (lambda it: it.request_finished(cast("Any", REQUEST), []), (True, {"a": 1}), [("finish", "r")]),
    "where it listens": (lambda it: it.get_handshake_metadata(), LISTENING, []),
    "preemptions": (lambda it: it.handle_preemptions(STEP), None, [("protect_preempted", STEP)]),
    "a step begins": (lambda it: it.bind_connector_metadata(STEP), None, [("begin_step", STEP)]),
    "a layer": (lambda it: it.save_kv_layer("name", torch.zeros(1), None), None, [("layer_saved", "name")]),
    "a step ends": (lambda it: it.wait_for_save(), None, [("end_step",)]),
    "what has ended": (
        lambda it: _results(it.get_transfer_results({"x"})),
        (*ENDED, {"failed"}),
        [("sent", {"x"})],
    ),
    "what has ended, before 0.30": (lambda it: it.get_finished({"x"}), ENDED, [("sent", {"x"})]),
    "blocks that did not come": (lambda it: it.get_block_ids_with_load_errors(), {7}, []),
    "lost attempts": (lambda it: it.build_connector_worker_meta(), LostAttempts((LOST,)), []),
}


def _results(results: Any) -> tuple[object, object, object]:
    return results.finished_sending, results.finished_recving, results.failed_recving


@pytest.mark.parametrize("name", CALLS)
def test_each_call_of_vllm_reaches_its_hook_and_gets_its_answer(name: str) -> None:
    call, answer, noted = CALLS[name]
    hooks = Noting()
    assert call(connector_with(hooks, hooks)) == answer
    assert hooks.calls == noted


NOTHING_YET: Final[dict[str, object]] = {
    "a step": StepMetadata(DecodeStep()),
    "matched tokens": (0, False),
    "an end": (False, None),
    "what has ended": (set(), set(), set()),
    "what has ended, before 0.30": (set(), set()),
    "blocks that did not come": set(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_connector_that_has_nothing_to_do_yet_answers_every_call(name: str) -> None:
    """The scheduler of a decode engine before its workers listen, and a worker before its memory is there."""
    assert CALLS[name][0](connector_with()) == NOTHING_YET.get(name)


class _Part:
    is_ended = False
    requests = worker = address = None

    def close(self, _: float) -> bool:
        self.is_ended = True
        return True


def _decode_worker(rank: Any, spans: TransferSpans) -> DecodeWorkerHooks:
    return DecodeWorkerHooks(rank, (16,), spans)


def no_spans() -> TransferSpans:
    return TransferSpans("engine", 0)


HOLDERS: Final[dict[str, Callable[[Any], SchedulerHooks | WorkerHooks]]] = {
    "decode's scheduler": lambda part: DecodeSchedulerHooks(part, None, None),
    "prefill's worker": lambda part: PrefillWorkerHooks(part, no_spans()),
    "decode's worker": lambda part: DecodeWorkerHooks(part, (16,), no_spans()),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_the_end_of_a_connector_is_that_of_what_its_hooks_hold(name: str) -> None:
    part, adapters = _Part(), _Part()
    hooks = HOLDERS[name](part)
    made = connector_with(scheduler=hooks) if isinstance(hooks, SchedulerHooks) else connector_with(worker=hooks)
    made._adapters = cast("Any", adapters)
    made.shutdown()
    assert (part.is_ended, adapters.is_ended) == (True, True)


def test_the_spans_of_a_worker_end_with_it() -> None:
    prefill, decode = no_spans(), no_spans()
    connector_with(worker=PrefillWorkerHooks(cast("Any", _Part()), prefill)).shutdown()
    connector_with(worker=DecodeWorkerHooks(cast("Any", _Part()), (16,), decode)).shutdown()
    assert (prefill._is_closing, decode._is_closing) == (True, True)


def test_a_connector_that_has_ended_is_not_asked_before_writes() -> None:
    made, other = connector_with(), connector_with()
    _PROTECTORS.extend([made.handle_preemptions, other.handle_preemptions])
    made.shutdown()
    assert other.handle_preemptions in _PROTECTORS
    assert made.handle_preemptions not in _PROTECTORS
    other.shutdown()
    assert _PROTECTORS == []


PARENT: Final = f"00-{'a' * 32}-{'b' * 16}-01"


def traced_request() -> Any:
    request = request_of([1, 2, 3])
    request.trace_headers = {"traceparent": PARENT}
    return request


def test_the_parents_of_traced_requests_go_to_prefills_workers_with_the_step() -> None:
    scheduler: Any = SimpleNamespace(add=lambda *_, **__: None, step=lambda *_, **__: PrefillStep(BootId("life")))
    hooks = PrefillSchedulerHooks(scheduler, resolved, None, keeps_last_token=False)
    hooks.add(traced_request(), {"do_remote_decode": True}, 0.0)
    output: Any = SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=0),
    )
    assert hooks.step(output, 0.0).parents == {"r": PARENT}
    assert hooks.step(output, 0.0).parents == {}


def test_the_parents_of_traced_requests_go_to_decodes_workers_with_the_step() -> None:
    requests: Any = SimpleNamespace(add=lambda *_, **__: None, begin=list, step=DecodeStep)
    hooks = DecodeSchedulerHooks(cast("Any", SimpleNamespace(requests=requests)), None, None)
    hooks.add(traced_request(), {"do_remote_prefill": True}, 0.0)
    output: Any = SimpleNamespace(scheduled_new_reqs=[])
    assert hooks.step(output, 0.0).parents == {"r": PARENT}
    assert hooks.step(output, 0.0).parents == {}


@pytest.mark.parametrize(
    ("holds", "step"), [(PrefillWorkerHooks, PrefillStep(BootId("life"))), (_decode_worker, DecodeStep())]
)
def test_a_worker_knows_of_a_traced_request_before_it_begins_with_it(holds: Any, step: Any) -> None:
    spans, known = no_spans(), []
    worker = SimpleNamespace(begin_step=lambda _: known.append(dict(spans._parents)))
    hooks = holds(cast("Any", SimpleNamespace(worker=worker, address=None)), spans)
    hooks.begin_step(StepMetadata(step, parents={RequestId("r"): PARENT}))
    assert known == [{"r": PARENT}]
    spans.close(0.0)
