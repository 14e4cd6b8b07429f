"""What engines would do anew at every start, done once: pods have the environment read-only, and caches of their own.

    bytecode      beside the modules, where Python looks for it
    model infos   in vLLM's cache: what a model's class can do. To find out, vLLM imports itself once more, in a process
                  of its own (vLLM 0.32 ``model_executor/models/registry.py``): ten seconds of a core for each engine

An engine whose cache outlives its pod has both. Nothing else of the cache is shared.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from e2e.layers import Say
from e2e.readable import let_others_read
from pdcluster_cli.models.tiny_model import ensure_folder
from pdcluster_cli.processes.engines import ENGINE_MODULE, PRELOAD

_LAST: Final = PRELOAD[-1]
"""Imported after all others: when it has bytecode, so have they."""
_MODULES: Final = (ENGINE_MODULE, *PRELOAD, "pdcluster_connector.vllm.connector", "mooncake.engine")
_REGISTRY: Final = "vllm.model_executor.models.registry"
_ARCHITECTURE: Final = "LlamaForCausalLM"
"""Of the tiny model."""
_NO_BYTECODE: Final = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
"""Machines that run tests like to set the first; every engine would compile all of vLLM and PyTorch again."""
_LIMIT_S: Final = 600.0


def ensure_warm(cache: Path, say: Say) -> Path:
    """Both are there; returns the folder that is vLLM's cache. Seconds, the first time."""
    if not Path(importlib.util.cache_from_source(str(_source(_LAST)))).exists():
        say("pdcluster: compiling what engines import (once)")
        _python(f"import {', '.join(_MODULES)}")
    return ensure_folder(cache / f"vllm-{_key()}", _write_model_infos)


def compiling_env(environ: Mapping[str, str]) -> dict[str, str]:
    """In which Python keeps what it compiles, beside the module and nowhere else."""
    return {name: value for name, value in environ.items() if name not in _NO_BYTECODE}


def _write_model_infos(folder: Path) -> None:
    look = f"from {_REGISTRY} import ModelRegistry; ModelRegistry.models[{_ARCHITECTURE!r}].inspect_model_cls()"
    _python(look, VLLM_CACHE_ROOT=str(folder))
    let_others_read(folder)


def _key() -> str:
    """vLLM itself takes an entry for stale when the class's file is another one."""
    read = [_source(module).read_bytes() for module in (_REGISTRY, _LAST)]
    return hashlib.sha256(b"\0".join(read)).hexdigest()[:12]


def _python(program: str, **env: str) -> None:
    command = [sys.executable, "-c", program]
    subprocess.run(command, env={**compiling_env(os.environ), **env}, capture_output=True, check=True, timeout=_LIMIT_S)


def _source(module: str) -> Path:
    """Without importing it: its package's folder says where it is."""
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.origin is not None, f"{package} is no package"
    return Path(spec.origin).parent.joinpath(*rest).with_suffix(".py")
