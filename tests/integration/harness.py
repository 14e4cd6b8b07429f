"""Real vLLM engines, the real router and clients for tests. Every engine is a fork of one zygote: about 2 s to ready.

Usage, in any test under ``tests/integration`` (mark the module with ``pytestmark = pytest.mark.engines``)::

    from integration.harness import Harness, complete, complete_all, metric

    def test_a_pool_answers_like_a_single_engine(harness: Harness) -> None:
        with harness.start_pool(prefill=1, decode=1, prefill_args=["--max-num-batched-tokens", "256"]) as pool:
            answer = complete(pool.url, prompt="Why is the sky blue?", max_tokens=16)      # greedy
            assert complete(pool.decode[0].url, prompt="...")                              # an engine directly
            assert metric(pool.decode[0].url, "vllm:kv_cache_usage_perc") == 0
            pool.prefill[0].read_trace("push")                                             # list of dicts
            pool.prefill[0].handle.signal(signal.SIGSTOP)                                  # break things
        with harness.single_engine(["--no-enable-prefix-caching"]) as engine:
            answer = complete(engine.url, prompt=[1, 2, 3], max_tokens=16)

``harness.model`` is the tiny model's folder, ``harness.start(plan)`` starts any ``EnginePlan``. Arguments given by a
test come last and win. Logs lie in pytest's temporary folder; a dead engine's last lines are in the exception.
The clients are synchronous; ``complete_all`` uses threads. ``eventually`` waits for a fact that has no event.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from integration.ports import fresh_port
from integration.processes import PYTHON_PATH
from patience import PATIENCE_S
from pdcluster_cli.local.options import DEFAULT_START_TIMEOUT_S
from pdcluster_cli.local.pool import PoolProcess, wait_ready
from pdcluster_cli.processes.engines import (
    LOOPBACK,
    OFFLINE,
    ROUTER_MODULE,
    EnginePlan,
    LocalDevice,
    PoolRole,
    engine_spec,
    preload_modules,
    router_argv,
    zygote_env,
)
from pdcluster_cli.processes.parallelism import ONE_RANK, ParallelSizes
from pdcluster_cli.processes.zygote import EngineHandle, EngineSpec, Zygote

Prompt: TypeAlias = str | Sequence[int]

START_TIMEOUT_S: Final = DEFAULT_START_TIMEOUT_S
"""As a user's: an engine is up in seconds here, and on a machine with other work in minutes."""
STOP_GRACE_S: Final = 5.0
V2_RUNNER_VARIABLE: Final = "PDCLUSTER_TESTS_V2_RUNNER"
"""Where it is set, all engines of a test session use vLLM's V2 model runner: see ``zoo/interpreted.py``."""
_V2_LINE: Final = "Using V2 Model Runner"
_V2_RUNNER: Final = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
BASE_ARGS: Final = (
    *("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", str(96 << 20)),
)
"""As a user's ``--prefill-args``: they come after those of ``processes/engines.py`` and win. Enough for one request of
the longest length of every model here, and for 24,576 tokens of the tiny one. An engine writes zeros to all of its KV
cache at its start, each rank for itself: it costs time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """One running engine or router."""

    name: str
    port: int
    handle: EngineHandle
    log_path: Path
    trace_file: Path
    internal_port: int = 0
    """A router's; engines have none."""
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{LOOPBACK}:{self.port}"

    def read_trace(self, event: str, at_least: int = 0) -> list[dict[str, Any]]:
        """The trace lines with this ``event``, oldest first. A request's line may come after its answer, however late:
        fails unless ``at_least`` so many come within ``PATIENCE_S``."""
        assert eventually(lambda: len(self._lines(event)) >= at_least), self._lines(event)
        return self._lines(event)

    def _lines(self, event: str) -> list[dict[str, Any]]:
        whole = self.trace_file.read_text().rpartition("\n")[0] if self.trace_file.exists() else ""
        return [line for line in map(json.loads, whole.splitlines()) if line["event"] == event]


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """A router with its engines. ``url`` is the router's."""

    router: Server
    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def engines(self) -> tuple[Server, ...]:
        return (*self.prefill, *self.decode)


class Harness:
    """Starts engines for tests. One for the whole session; its methods may be called by one test at a time."""

    def __init__(self, zygote: Zygote, model: Path, folder: Path) -> None:
        self.zygote = zygote
        self.model = model
        self.folder = folder
        self._numbers = itertools.count(1)

    @contextmanager
    def start_pool(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        prefill_connector: Mapping[str, object] | None = None,
        decode_connector: Mapping[str, object] | None = None,
        prefill_kv_transfer: Mapping[str, object] | None = None,
        first_prefill_kv_transfer: Mapping[str, object] | None = None,
        router_args: Sequence[str] = (),
        load_failure_policy: str = "fail",
        model: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Iterator[Pool]:
        """All engines and the router answer; they are stopped at the end of the ``with``.

        ``..._kv_transfer`` overrides keys of ``--kv-transfer-config``, of every prefill engine or of the first.
        """
        common = self.plan(PoolRole.PREFILL)
        common = dataclasses.replace(
            common, model=model or self.model, load_failure_policy=load_failure_policy, env=env or {}
        )
        prefills = [
            self._named(common, PoolRole.PREFILL, prefill_args, prefill_connector or {}) for _ in range(prefill)
        ]
        decodes = [self._named(common, PoolRole.DECODE, decode_args, decode_connector or {}) for _ in range(decode)]
        overrides = [first_prefill_kv_transfer or prefill_kv_transfer or {}, *[prefill_kv_transfer or {}] * prefill]
        plans = [dataclasses.replace(p, kv_transfer=o) for p, o in zip(prefills, overrides, strict=False)] + decodes
        with self.start(*plans) as engines, self.router(engines[:prefill], engines[prefill:], router_args) as router:
            yield Pool(router, engines[:prefill], engines[prefill:])

    @contextmanager
    def single_engine(
        self, args: Sequence[str] = (), *, model: Path | None = None, parallelism: ParallelSizes = ONE_RANK
    ) -> Iterator[Server]:
        """One plain vLLM engine without a connector."""
        plan = dataclasses.replace(
            self.plan(PoolRole.SINGLE), model=model or self.model, args=(*BASE_ARGS, *args), parallelism=parallelism
        )
        with self.start(plan) as engines:
            yield engines[0]

    @contextmanager
    def start_tls_pool(
        self, engine_args: Sequence[str], decode_connector: Mapping[str, object], router_args: Sequence[str]
    ) -> Iterator[Pool]:
        """A pair with TLS, by ``engine_args``. Only the router asks how they are."""
        common = self.plan(PoolRole.PREFILL)
        plans = [
            self._named(common, PoolRole.PREFILL, engine_args, {}),
            self._named(common, PoolRole.DECODE, engine_args, decode_connector),
        ]
        with ExitStack() as stack:
            engines = [self._start(stack, engine_spec(plan), plan.port, plan.trace_file) for plan in plans]
            prefill, decode = (dataclasses.replace(engine, scheme="https") for engine in engines)
            router = stack.enter_context(self.router([prefill], [decode], router_args))
            yield Pool(router, (prefill,), (decode,))

    @contextmanager
    def start(self, *plans: EnginePlan) -> Iterator[tuple[Server, ...]]:
        """Any engines, started at once, all healthy."""
        with ExitStack() as stack:
            servers = tuple(self._start(stack, engine_spec(plan), plan.port, plan.trace_file) for plan in plans)
            _wait_all(servers)
            _require_the_runner(servers)
            yield servers
            for server in servers:
                server.handle.signal(signal.SIGTERM)  # they end side by side

    def plan(self, role: PoolRole) -> EnginePlan:
        """A plan with a fresh name, port and files, to be changed with ``dataclasses.replace``."""
        name = f"{role.value}-{next(self._numbers)}"
        return EnginePlan(
            name=name,
            role=role,
            model=self.model,
            port=fresh_port(),
            log_path=self.folder / f"{name}.log",
            trace_file=self.folder / f"{name}.trace",
            args=BASE_ARGS,
        )

    def _named(
        self, common: EnginePlan, role: PoolRole, args: Sequence[str], connector: Mapping[str, object]
    ) -> EnginePlan:
        return dataclasses.replace(
            self.plan(role),
            model=common.model,
            load_failure_policy=common.load_failure_policy,
            env=common.env,
            args=(*BASE_ARGS, *args),
            connector=connector,
        )

    @contextmanager
    def router(self, prefill: Sequence[Server], decode: Sequence[Server], args: Sequence[str] = ()) -> Iterator[Server]:
        """A router over engines that run already. Several may share an engine: one for each pair, say."""
        name, port, internal_port = f"router-{next(self._numbers)}", fresh_port(), fresh_port()
        trace_file = self.folder / f"{name}.trace"
        argv = router_argv(
            prefill=[engine.url for engine in prefill],
            decode=[engine.url for engine in decode],
            port=port,
            internal_port=internal_port,
            trace_file=trace_file,
            args=tuple(args),
        )
        spec = EngineSpec(name, ROUTER_MODULE, argv, {}, self.folder / f"{name}.log")
        with ExitStack() as stack:
            server = self._start(stack, spec, port, trace_file)
            _wait_all([server])
            yield dataclasses.replace(server, internal_port=internal_port)

    def _start(self, stack: ExitStack, spec: EngineSpec, port: int, trace_file: Path | None) -> Server:
        handle = self.zygote.start_engine(spec)
        stack.callback(handle.stop, STOP_GRACE_S)
        return Server(spec.name, port, handle, spec.log_path, trace_file or spec.log_path.with_suffix(".trace"))


def _wait_all(servers: Sequence[Server]) -> None:
    members = [PoolProcess(server.name, server.port, server.handle) for server in servers]
    wait_ready(members, members, lambda _: None, deadline=time.monotonic() + START_TIMEOUT_S)


def _require_the_runner(servers: Sequence[Server]) -> None:
    """vLLM falls back to the other runner with a warning, and a test would prove what it did not run."""
    if V2_RUNNER_VARIABLE in os.environ:
        for server in servers:
            assert _V2_LINE in server.log_path.read_text(), f"{server.name} does not use vLLM's V2 model runner"


def harness_env() -> dict[str, str | None]:
    """The zygote's environment for tests: that of users whose model is surely here."""
    # Engines load the tests' own connectors and probes by name.
    ours = {**zygote_env(LocalDevice.CPU), **OFFLINE, "PYTHONPATH": PYTHON_PATH}
    return {**ours, **_V2_RUNNER} if V2_RUNNER_VARIABLE in os.environ else ours


def zygote_modules() -> tuple[str, ...]:
    """What the tests' zygote imports, in order."""
    first = ("zoo.interpreted",) if V2_RUNNER_VARIABLE in os.environ else ()
    return (*first, *preload_modules(LocalDevice.CPU), "zoo.preload")


class HttpError(Exception):
    """The server answered something else than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One choice of an answer; ``reply`` is the whole JSON object."""

    token_ids: tuple[int, ...]
    text: str
    reply: Mapping[str, Any]


def complete(
    url: str, prompt: Prompt, max_tokens: int = 16, *, timeout_s: float = PATIENCE_S, **body: Any
) -> Completion:
    """A greedy ``/v1/completions`` answer. Further keywords go into the body.

    Raises:
        HttpError: The status was not 200.
    """
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **body}
    reply = post_json(f"{url}/v1/completions", request, timeout_s=timeout_s)
    choice = reply["choices"][0]
    return Completion(tuple(choice["token_ids"]), choice["text"], reply)


def complete_all(
    url: str,
    prompts: Sequence[Prompt],
    max_tokens: int = 16,
    *,
    concurrency: int = 16,
    timeout_s: float = PATIENCE_S,
    **body: Any,
) -> list[Completion]:
    """The answers to ``prompts`` in their order, ``concurrency`` of them in flight."""
    with ThreadPoolExecutor(concurrency, thread_name_prefix="client") as threads:

        def ask(prompt: Prompt) -> Completion:
            return complete(url, prompt, max_tokens, timeout_s=timeout_s, **body)

        return list(threads.map(ask, prompts))


def post_json(url: str, body: Mapping[str, Any], *, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    """The JSON object that the server answers to a POST.

    Raises:
        HttpError: The status was not 200.
    """
    with opened(url, "POST", json.dumps(body).encode(), timeout_s) as response:
        reply: dict[str, Any] = json.loads(response.read())
        return reply


def get_text(url: str, *, timeout_s: float = PATIENCE_S) -> str:
    """The body that the server answers to a GET.

    Raises:
        HttpError: The status was not 200.
    """
    with opened(url, "GET", None, timeout_s) as response:
        return response.read().decode()


@contextmanager
def opened(
    url: str, method: str, body: bytes | None, timeout_s: float, headers: Mapping[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """A response whose body is still to be read; leaving the ``with`` early is a client that goes away.

    Raises:
        HttpError: The status was not 200.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=timeout_s)
    try:
        connection.request(method, parts.path, body, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise HttpError(response.status, response.read().decode(errors="replace"))
        yield response
    finally:
        connection.close()


def metric(url: str, name: str, label: str = "") -> float:
    """The sum over all samples, or those with ``label`` (``kind="x"``), of one metric; KeyError if there is none."""
    samples = [line.rpartition(" ") for line in get_text(f"{url}/metrics").splitlines() if line.startswith(name)]
    named = [(labelled, value) for labelled, _, value in samples if labelled.partition("{")[0].strip() == name]
    values = [float(value) for labelled, value in named if label in labelled]
    if not values:
        raise KeyError(name)
    return sum(values)


def blocks_in_use(*engines: Server) -> float:
    """The sum over all engines of the share of their KV blocks that requests hold."""
    return sum(metric(engine.url, "vllm:kv_cache_usage_perc") for engine in engines)


def eventually(is_true: Callable[[], bool], *, timeout_s: float = PATIENCE_S, poll_s: float = 0.02) -> bool:
    """Whether the fact became true in time. For facts of other processes that send no event.

    The limit costs nothing where the fact comes; a test that waits for nothing to happen gives its own.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True
