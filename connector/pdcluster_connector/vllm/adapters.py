"""The LoRA adapters of one engine: what requests ask for, and when vLLM's workers read the files.

vLLM tells a connector nothing of the adapters that its workers load. So this module stands around the one method that
reads them, ``WorkerLoRAManager._load_adapter`` (vLLM 0.23 to 0.33 ``lora/worker_manager.py``; both managers and both
model runners use it). vLLM calls it in the worker's own thread before the forward pass that needs the adapter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Final, TypeAlias

from huggingface_hub import snapshot_download
from vllm.config import LoRAConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from pdcluster_connector.adapter_files import folder_of
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterRequest

_LoadMethod: TypeAlias = Callable[[WorkerLoRAManager, LoRARequest], LoRAModel]

_MODELSCOPE: Final = "VLLM_USE_MODELSCOPE"
_METHOD: Final = "_load_adapter"
_LOOKS: Final = 100
_TENSORIZED: Final = "it is read by tensorizer, and no file of it is known: serve it as a folder"


@dataclass(frozen=True, slots=True)
class _AdapterWatcher:
    config: LoRAConfig
    loads: AdapterLoads


_WATCHERS: Final[list[_AdapterWatcher]] = []
"""The workers of this process: one, and several in tests. The forward thread owns it."""

_INNER: Final[list[_LoadMethod]] = []
"""vLLM's own method, once ours stands around it."""


def adapter_of(request: LoRARequest, config: LoRAConfig) -> AdapterRequest:
    """The adapter that vLLM's ``request`` wants."""
    modules = ",".join(sorted(config.target_modules)) if config.target_modules else "all"
    use = (
        f"--lora-dtype {config.lora_dtype}, --lora-target-modules {modules}, "
        f"--enable-tower-connector-lora {config.enable_tower_connector_lora}, "
        f"--enable-mixed-moe-lora-format {config.enable_mixed_moe_lora_format}, "
        f"3D weights {request.is_3d_lora_weight}"
    )
    return AdapterRequest(
        request.lora_int_id,
        request.lora_name,
        request.lora_path,
        use,
        request.load_inplace,
        _TENSORIZED if getattr(request, "tensorizer_config_dict", None) else "",
    )


def watch_loads(config: LoRAConfig | None) -> AdapterLoads | None:
    """The adapters that vLLM loads in this process from now on; None: the engine serves none. Ends with ``unwatch``."""
    if config is None:
        return None
    loads = AdapterLoads()
    _wrap_load()
    _WATCHERS.append(_AdapterWatcher(config, loads))
    return loads


def unwatch(loads: AdapterLoads) -> None:
    """``loads`` hears no more. The caller closes it."""
    _WATCHERS[:] = [watcher for watcher in _WATCHERS if watcher.loads is not loads]


def _wrap_load() -> None:
    """vLLM's method calls ours, once for all workers of this process."""
    if not _INNER:
        _INNER.append(WorkerLoRAManager._load_adapter)
        setattr(WorkerLoRAManager, _METHOD, _watched(_INNER[0]))


def _watched(inner: _LoadMethod) -> _LoadMethod:
    @wraps(inner)
    def load(manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        asked = [(watcher.loads, adapter_of(request, watcher.config)) for watcher in _WATCHERS]
        before = [(loads, one, loads.files_before(one)) for loads, one in asked]
        model = inner(manager, request)
        for loads, one, files in before:
            loads.loaded(one, files, _folder_read(one.path), partial(_is_resident, manager, one.number))
        return model

    return load


def _folder_read(path: str) -> str | None:
    """The folder that vLLM has just read for ``path``: of a name in a hub, its newest snapshot in this machine's cache.

    None: it is not found, or vLLM takes names from ModelScope.
    """
    if (folder := folder_of(path)) is not None:
        return folder
    if os.environ.get(_MODELSCOPE, "").strip().lower() in ("1", "true"):  # vLLM 0.32 ``envs.py``
        return None
    try:
        return str(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):
        return None


def _is_resident(manager: WorkerLoRAManager, number: int) -> bool:
    """Whether the worker holds the adapter. Any thread: if the forward thread changes vLLM's list while it is copied,
    it is copied again. If that goes on, no."""
    for _ in range(_LOOKS):
        try:
            return number in manager.list_adapters()
        except (KeyError, RuntimeError):  # vLLM 0.32 ``utils/cache.py`` copies a dict by the keys of another
            continue
    return False
