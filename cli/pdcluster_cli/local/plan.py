"""Makes the plan of each engine on this machine from the options of ``pdcluster local``. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pdcluster_cli.local.options import Options
from pdcluster_cli.numbers import is_whole
from pdcluster_cli.processes.engines import CPU_ARGS, VISIBLE, EnginePlan, LocalDevice, PoolRole
from pdcluster_cli.processes.parallelism import MAX_SIZE, ParallelSizes

ACCELERATOR_SHARE: Final = 0.8
"""Share of an accelerator's memory for all engines on it together. vLLM's default is made for one engine alone."""
TINY_MODEL_ARGS: Final = ("--dtype", "float32", "--max-model-len", "8192")
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine as far as engines may use it. ``accelerators``: as the device's variable names them; none on the
    CPU."""

    device: LocalDevice
    num_cores: int
    accelerators: tuple[str, ...] = ()
    free_bytes: int | None = None
    """Bytes of memory that are free now; None: not known."""

    @property
    def num_accelerators(self) -> int:
        return len(self.accelerators)


def plan_engines(
    options: Options, machine: Machine, *, model: Path | str, folder: Path, ports: Sequence[int]
) -> list[EnginePlan]:
    """One plan for each engine, prefill engines first, on ``ports`` in this order."""
    roles = [PoolRole.PREFILL] * options.prefill + [PoolRole.DECODE] * options.decode
    numbers = [*range(options.prefill), *range(options.decode)]
    return [
        EnginePlan(
            name=f"{role.value}-{number}",
            role=role,
            model=model,
            port=port,
            log_path=folder / f"{role.value}-{number}.log",
            device=machine.device,
            parallelism=parallelism_of(options, role),
            num_threads=max(1, machine.num_cores // options.num_ranks),
            args=engine_args(options, role, machine),
            trace_file=folder / f"{role.value}-{number}.trace",
            env=device_env(options, machine, role, number),
        )
        for role, number, port in zip(roles, numbers, ports, strict=True)
    ]


def parallelism_of(options: Options, role: PoolRole) -> ParallelSizes:
    return options.prefill_parallelism if role is PoolRole.PREFILL else options.decode_parallelism


def engine_args(options: Options, role: PoolRole, machine: Machine) -> tuple[str, ...]:
    """vLLM arguments: our defaults first, the user's last, so the user's win."""
    tiny = TINY_MODEL_ARGS if options.model is None else ()
    return (*_shared_args(options, machine), *tiny, *args_of(options, role))


def args_of(options: Options, role: PoolRole) -> tuple[str, ...]:
    """The vLLM arguments that the user gave for the role."""
    return options.prefill_args if role is PoolRole.PREFILL else options.decode_args


def device_env(options: Options, machine: Machine, role: PoolRole, number: int) -> dict[str, str | None]:
    """The variable that gives each rank an accelerator: engine after engine, and from the first again if all are taken.

    Example: prefill TP 2 and two decode engines on four accelerators → 0,1 and 2 and 3.
    """
    if machine.num_accelerators == 0 or options.num_engines == 1:
        return {}
    ranks = parallelism_of(options, role).num_ranks
    before = 0 if role is PoolRole.PREFILL else options.prefill * options.prefill_parallelism.num_ranks
    first = before + number * ranks
    taken = [machine.accelerators[rank % machine.num_accelerators] for rank in range(first, first + ranks)]
    return {VISIBLE[machine.device]: ",".join(taken)}


def problems_here(options: Options, machine: Machine) -> list[str]:
    """Why this machine cannot run what the options ask for: a line for each reason."""
    found = [_accelerator_problem(options, machine, role) for role in (PoolRole.PREFILL, PoolRole.DECODE)]
    return [problem for problem in (*found, _memory_problem(options, machine)) if problem]


def split_problems(options: Options, config: Mapping[str, Any]) -> list[str]:
    """Why vLLM cannot split the model of this ``config.json`` as asked; empty: it can, or the file does not say.

    Source of truth: vLLM 0.32, ``verify_with_parallel_config`` and ``QKVParallelLinear``. Engines would say so after
    a minute of imports.
    """
    found = [_split_problem(options, role, config) for role in (PoolRole.PREFILL, PoolRole.DECODE)]
    return [problem for problem in found if problem]


def remarks(options: Options, machine: Machine) -> list[str]:
    """Lines about choices that work but may surprise."""
    if machine.device is LocalDevice.CPU and options.num_ranks > machine.num_cores:
        return [f"{options.num_ranks} ranks share {_counted(machine.num_cores, 'core')}: everything takes longer"]
    return []


def kv_cache_bytes(words: Sequence[str]) -> int | None:
    """Bytes of one rank's KV cache, the last that ``words`` give; None: not given, or not as a plain number."""
    found = None
    for word, following in zip(words, (*words, "")[1:], strict=True):
        name, has_value, value = word.partition("=")
        if name.replace("_", "-") == "--kv-cache-memory-bytes":
            text = value if has_value else following
            found = int(text) if is_whole(text) else None
    return found


def _shared_args(options: Options, machine: Machine) -> tuple[str, ...]:
    if machine.device is LocalDevice.CPU or machine.num_accelerators >= options.num_ranks:
        return ()
    sharers = math.ceil(options.num_ranks / max(1, machine.num_accelerators))
    return ("--gpu-memory-utilization", f"{ACCELERATOR_SHARE / sharers:.2g}")


def _accelerator_problem(options: Options, machine: Machine, role: PoolRole) -> str | None:
    ranks = parallelism_of(options, role).num_ranks
    if machine.num_accelerators == 0 or ranks <= machine.num_accelerators:
        return None
    have = _counted(machine.num_accelerators, "accelerator")
    return f"a {role.value} engine of {ranks} ranks needs {ranks} accelerators, this machine has {have}: split it less"


def _split_problem(options: Options, role: PoolRole, config: Mapping[str, Any]) -> str | None:
    size = parallelism_of(options, role).tensor
    heads, kv_heads = _heads_in(config)
    if heads is None or _has_own_config(args_of(options, role)):
        return None
    sizes = [one for one in range(1, MAX_SIZE + 1) if heads % one == 0 and _can_share(one, kv_heads or one)]
    if size in sizes:
        return None
    told = _counted(heads, "attention head") + (f" and {_counted(kv_heads, 'KV head')}" if kv_heads else "")
    return (
        f"{role.value} TP {size} cannot split the model's {told}: give --{role.value}-tp one of "
        f"{', '.join(map(str, sizes))}"
    )


def _heads_in(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Numbers of attention heads and KV heads; None: unknown. A model for several kinds of input: the text model's.
    vLLM does not split a latent (MLA), so it has no KV heads here, even if the configuration gives a number."""
    text = config.get("text_config")
    found = text if isinstance(text, dict) else config
    heads, kv_heads = (_positive(found.get(name)) for name in ("num_attention_heads", "num_key_value_heads"))
    return heads, None if "kv_lora_rank" in found else kv_heads


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _can_share(size: int, heads: int) -> bool:
    """Whether each rank holds the same number of heads, or each head is on the same number of ranks."""
    return size % heads == 0 or heads % size == 0


def _has_own_config(words: Sequence[str]) -> bool:
    """Whether the user's options make vLLM change the model's configuration, or read another than its newest."""
    return any(word.replace("_", "-").startswith(("--hf-", "--config", "--revision", "--model")) for word in words)


def _memory_problem(options: Options, machine: Machine) -> str | None:
    """Why KV caches do not fit into memory on a CPU. vLLM fills them as it starts: the kernel would kill engines."""
    if machine.device is not LocalDevice.CPU or machine.free_bytes is None:
        return None
    sizes = {role: kv_cache_bytes((*CPU_ARGS, *engine_args(options, role, machine))) for role in PoolRole}
    needed = (sizes[PoolRole.PREFILL] or 0) * options.prefill * options.prefill_parallelism.num_ranks
    needed += (sizes[PoolRole.DECODE] or 0) * options.decode * options.decode_parallelism.num_ranks
    if needed <= machine.free_bytes:
        return None
    return (
        f"KV caches of {_counted(options.num_ranks, 'rank')} need {needed / _GIB:.1f} GiB, and "
        f"{machine.free_bytes / _GIB:.1f} GiB of memory are free: give --kv-cache-memory-bytes less "
        "(--prefill-args, --decode-args), or start fewer engines"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
