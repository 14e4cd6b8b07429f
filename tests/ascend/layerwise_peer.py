"""A prefill and a decode engine without a device: vLLM 0.23's scheduler with vllm-ascend's released connector in it.

    PYTHONPATH=tests/ascend/stand_in:tests:SOURCES python -m ascend.layerwise_peer MODEL

runs in the environment of vLLM 0.23 and prints the URLs of both. Scheduling, blocks, ids, the scheduler's half of the
connector, its call to the metaserver, and how its workers count who is done are theirs. Played here: HTTP, and the
model. A prompt is "computed" when prefill is told so (``POST /compute``); ``GET`` tells the orders and the free blocks.
"""

from __future__ import annotations

import json
import select
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, Final

import torch
import vllm_ascend.utils

vllm_ascend.utils._ascend_device_type = vllm_ascend.utils.AscendDeviceType.A2  # what its build writes to a file

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.entrypoints.openai.engine.serving import OpenAIServing  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.input_processor import InputProcessor  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402
from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as theirs  # noqa: E402

BLOCKS: Final = 64
BLOCK_TOKENS: Final = 16
PROMPT: Final = list(range(1, 41))
POLL_S: Final = 0.02


def scheduler_of(model: str, role: str, name: str) -> Scheduler:
    """vLLM's own, for one attention layer, with their connector."""
    transfer = KVTransferConfig(
        kv_connector="MooncakeLayerwiseConnector",
        kv_connector_module_path=theirs.__name__,
        kv_role=role,
        engine_id=name,
        kv_port=6000,
    )
    config = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=False,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=64, dtype=torch.float32)
    caches = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
    return Scheduler(config, caches, StructuredOutputManager(config), BLOCK_TOKENS, log_stats=False)


class Engine:
    """One scheduler, whose lock is held for every look and step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.lock = threading.Condition()
        self.num_free_at_start = self.num_free
        self.orders: list[dict[str, Any]] = []
        self.num_ended = 0

    @property
    def num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, path: str, headers: Any, body: dict[str, Any]) -> Request:
        """The request under the ids that vLLM's API layer and input processor make."""
        base = OpenAIServing._base_request_id(SimpleNamespace(headers=headers))
        named = SimpleNamespace(
            request_id=f"chatcmpl-{base}" if "chat" in path else f"cmpl-{base}-0", external_req_id=None
        )
        InputProcessor.assign_request_id(named)
        extra = {"kv_transfer_params": body["kv_transfer_params"]} if body.get("kv_transfer_params") else {}
        sampling = SamplingParams(max_tokens=body.get("max_tokens") or 16, extra_args=extra)
        request = Request(named.request_id, list(PROMPT), sampling, None)
        with self.lock:
            self.scheduler.add_request(request)
        return request

    def end(self, request: Request, status: RequestStatus) -> None:
        with self.lock:
            if request.request_id in self.scheduler.requests:
                self.scheduler.finish_requests(request.request_id, status)
            self.num_ended += 1


class Decode(Engine):
    """Also the receiving thread of its one rank, never started: only its counting is used."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        ready = threading.Event()
        metadata = theirs.MooncakeAgentMetadata(0, {})
        self.receiver = theirs.KVCacheRecvingLayerThread(0, 6000, 1, 1, "decode", metadata, ready)
        self.names: dict[str, str] = {}

    def serve(
        self, path: str, headers: Any, body: dict[str, Any], is_gone: Callable[[], bool]
    ) -> dict[str, Any] | None:
        request = self.add(path, headers, body)
        self.names[theirs.get_external_request_id(request.request_id)] = request.request_id
        with self.lock:
            self.scheduler.schedule()
            while request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and not is_gone():
                self.lock.wait(POLL_S)
                self.step()
            is_answered = request.status == RequestStatus.RUNNING
        self.end(request, RequestStatus.FINISHED_LENGTH_CAPPED if is_answered else RequestStatus.FINISHED_ABORTED)
        return {"object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}

    def pushed(self, request_id: str, num_ranks: int, rank: str) -> None:
        """One prefill rank has said so."""
        self.receiver.update_done_task(request_id, num_ranks, rank)
        with self.lock:
            self.step()
            self.lock.notify_all()

    def step(self) -> None:
        received = {self.names[name] for name in self.receiver.get_and_clear_done_requests()}
        if received:
            self.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=received))
            self.scheduler.schedule()


class Prefill(Engine):
    def __init__(self, scheduler: Scheduler, decode: Decode) -> None:
        super().__init__(scheduler)
        self.decode = decode
        self.may_compute = threading.Event()
        self.must_fail = False

    def serve(
        self, path: str, headers: Any, body: dict[str, Any], is_gone: Callable[[], bool]
    ) -> dict[str, Any] | None:
        self.orders.append(body)
        while not self.may_compute.wait(POLL_S):
            if is_gone():
                return None
        if self.must_fail:
            return None
        request = self.add(path, headers, body)
        with self.lock:
            said = self.scheduler.schedule().kv_connector_metadata.requests[request.request_id]
        assert said.chunk_finish
        assert said.remote_block_ids == body["kv_transfer_params"]["remote_block_ids"]
        self.decode.pushed(theirs.get_external_request_id(request.request_id), 1, f"{said.remote_host}:7000")
        self.end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        return {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "kv_transfer_params": None}


def handler_of(engine: Decode | Prefill) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state = {
                "orders": engine.orders,
                "ended": engine.num_ended,
                "free": engine.num_free,
                "free_at_start": engine.num_free_at_start,
            }
            self._answer(200, state)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/compute":
                assert isinstance(engine, Prefill)
                engine.must_fail = body["must_fail"]
                (engine.may_compute.set if body["may_compute"] else engine.may_compute.clear)()
                self._answer(200, {})
                return
            answer = engine.serve(self.path, self.headers, body, self._is_gone)
            if answer is None:
                self._answer(500, {"error": {"message": "no", "type": "x", "param": None, "code": 500}})
            else:
                self._answer(200, answer)

        def _is_gone(self) -> bool:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable)

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its signature
            """Nothing."""

    return Handler


def serve(engine: Decode | Prefill) -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(engine))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def mixed_ranks_look_whole(decode: Decode) -> bool:
    """Whether one rank of each of two prefill engines makes a prompt that two ranks of one push."""
    decode.receiver.update_done_task("torn", 2, "10.0.0.1:7000")
    decode.receiver.update_done_task("torn", 2, "10.0.0.2:7000")
    return "torn" in decode.receiver.get_and_clear_done_requests()


def main() -> None:
    decode = Decode(scheduler_of(sys.argv[1], "kv_consumer", "decode"))
    prefill = Prefill(scheduler_of(sys.argv[1], "kv_producer", "prefill"), decode)
    facts = {"prefill": serve(prefill), "decode": serve(decode), "torn": mixed_ranks_look_whole(decode)}
    print("peer " + json.dumps(facts), flush=True)
    sys.stdin.read()  # Until the test ends.


if __name__ == "__main__":
    main()
