"""Starts engines and routers in one place. All of them end with the ``with`` block."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.client import Server
from benchmarks.places import Place, free_port

from pdcluster_cli.local.pool import PoolProcess, wait_ready
from pdcluster_cli.models.tiny_model import ModelShape, ensure_tiny_model
from pdcluster_cli.processes.engines import (
    LOOPBACK,
    OFFLINE,
    ROUTER_MODULE,
    SCRATCH,
    EnginePlan,
    LocalDevice,
    PoolRole,
    engine_spec,
    preload_modules,
    router_argv,
    zygote_env,
)
from pdcluster_cli.processes.zygote import EngineHandle, EngineSpec, Zygote

_KV_ELEMENT_BYTES: Final = 2
_NULL_BLOCK: Final = 128
"""Tokens of the block that vLLM keeps for itself, on a CPU."""
MAX_TOKENS: Final = 8192
ENGINE_ARGS: Final = (
    *("--dtype", "bfloat16", "--no-enable-prefix-caching", "--no-enable-log-requests"),
    *("--max-num-batched-tokens", str(MAX_TOKENS), "--max-num-seqs", "16"),
)
ROUTER_ARGS: Final = ("--queue-timeout", "600", "--prefill-timeout", "600", "--request-timeout", "600")
START_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Served:
    """The model of every engine, and its room for KV in tokens. Requests beyond that wait."""

    model: ModelShape
    room_tokens: int = 10_240
    """The longest prompt and room for its answer."""
    more_args: tuple[str, ...] = ()
    """vLLM arguments that come last, and so override the others."""

    @property
    def kv_token_bytes(self) -> int:
        """KV of one token in all layers."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _KV_ELEMENT_BYTES

    @property
    def args(self) -> tuple[str, ...]:
        """vLLM's arguments. vLLM refuses a context that its KV cache, less one block, could not hold."""
        room_bytes, context = self.room_tokens * self.kv_token_bytes, min(MAX_TOKENS, self.room_tokens - _NULL_BLOCK)
        room = ("--kv-cache-memory-bytes", str(room_bytes), "--max-model-len", str(context))
        return (*ENGINE_ARGS, *room, *self.more_args)


def wide_kv(num_layers: int, kv_heads: int) -> ModelShape:
    """A model with as many heads as KV heads: the most KV for its compute. Example: 16 and 8 → 64 KiB per token."""
    return ModelShape(num_layers, kv_heads, kv_heads, head_dim=128, hidden=64 * kv_heads, intermediate=128 * kv_heads)


WIDE_KV: Final = Served(wide_kv(num_layers=16, kv_heads=8))
"""64 KiB of KV per token in bf16, a usual figure for served models."""
DEEP_KV: Final = Served(wide_kv(num_layers=32, kv_heads=4))
"""The same KV per token in twice as many layers."""


class Starter:
    """Engines and routers of one place. One thread uses it."""

    def __init__(self, place: Place, folder: Path, served: Served = WIDE_KV) -> None:
        """``folder``: for logs and traces; made here."""
        folder.mkdir()
        self.place = place
        self._folder = folder
        self._model = ensure_tiny_model(served.model)
        self._args = served.args
        self._waiting: list[PoolProcess] = []
        self._peers: list[EngineHandle] = []
        with place.starting():  # the engines are its children, so they live there too
            self._zygote = Zygote(
                preload_modules(LocalDevice.CPU),
                env={**zygote_env(LocalDevice.CPU), **OFFLINE},
                log_path=folder / "zygote.log",
                scratch=SCRATCH,
            )

    def __enter__(self) -> Self:
        self._zygote.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._zygote.__exit__(kind, error, tb)

    def start_engine(self, role: PoolRole, name: str, **connector: object) -> EnginePlan:
        """Starts an engine in ``role``, with our connector if the role transfers KV. ``connector``: its settings."""
        plan = self._plan(role, name)
        plan = replace(
            plan,
            trace_file=self._folder / f"{name}.trace",
            connector={"host": self.place.host, **connector},
        )
        return self._start_engine(plan)

    def start_peer(
        self, role: PoolRole, name: str, kv_transfer: Mapping[str, object], env: Mapping[str, str]
    ) -> Server:
        """Starts an engine with another connector. ``kv_transfer``: its ``KVTransferConfig``."""
        plan = replace(self._plan(role, name), kv_transfer=kv_transfer, env=env)
        self._peers.append(self._start(engine_spec(plan), plan.port))
        return Server(self.place.host if role is PoolRole.PREFILL else LOOPBACK, plan.port)

    def take_peers(self) -> tuple[EngineHandle, ...]:
        """The engines that ``start_peer`` has started since the last call."""
        taken, self._peers = tuple(self._peers), []
        return taken

    def start_router(
        self, name: str, prefill_host: str, prefill: EnginePlan, decode: EnginePlan
    ) -> tuple[Server, Path]:
        """Starts a router. Returns where it listens, and its trace file."""
        port, trace_file = self.free_port(), self._folder / f"{name}.trace"
        argv = router_argv(
            prefill=[f"http://{prefill_host}:{prefill.port}"],
            decode=[f"http://{LOOPBACK}:{decode.port}"],
            port=port,
            trace_file=trace_file,
            args=ROUTER_ARGS,
        )
        self._start(EngineSpec(name, ROUTER_MODULE, argv, {}, self._folder / f"{name}.log"), port)
        return Server(LOOPBACK, port), trace_file

    def wait_ready(self) -> None:
        """Waits until all engines and routers that were started answer.

        Raises:
            EngineDied: A process has ended instead.
            TimeoutError: A process does not answer within ``START_TIMEOUT_S``.
        """
        waiting, self._waiting = self._waiting, []
        with self.place.inside():
            wait_ready(waiting, waiting, lambda _: None, deadline=time.monotonic() + START_TIMEOUT_S)

    def free_port(self) -> int:
        """A port that is free in this place now."""
        with self.place.inside():
            return free_port()

    def _plan(self, role: PoolRole, name: str) -> EnginePlan:
        return EnginePlan(
            name=name,
            role=role,
            model=self._model,
            port=self.free_port(),
            log_path=self._folder / f"{name}.log",
            num_threads=1,
            args=(*self._args, "--host", self.place.bind_host),
        )

    def _start_engine(self, plan: EnginePlan) -> EnginePlan:
        self._start(engine_spec(plan), plan.port)
        return plan

    def _start(self, spec: EngineSpec, port: int) -> EngineHandle:
        handle = self._zygote.start_engine(spec)
        self._waiting.append(PoolProcess(spec.name, port, handle))
        return handle
