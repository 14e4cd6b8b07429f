"""Finds out whether engines can get the model of ``--model``: a folder, a file, or a name on a hub. Starts nothing.

It accepts all that ``vllm serve`` takes, with the same variables (``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``,
``HF_HUB_OFFLINE``, ``VLLM_USE_MODELSCOPE``). It asks a hub once, because engines would try a silent hub for minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, Final

HUB_TIMEOUT_S: Final = 5.0
"""Seconds for the hub's answer, which takes a tenth of a second if there is a network."""
_CONFIGS: Final = ("config.json", "params.json", "*.gguf")
"""Files of a folder that vLLM can load: transformers' or Mistral's configuration, or weights that hold one."""
_YES: Final = ("1", "true", "yes", "on")
_WANTED: Final = "--model wants a folder with config.json, weights and a tokenizer, or a model's name on a hub"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model as engines get it. ``problem``: why they cannot, one line with the cure; None: they can."""

    argument: str
    problem: str | None = None
    remark: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the engines, which keep them from asking a hub that does not answer."""
    config_file: Path | None = None
    """Path of its ``config.json``, which may not exist; None: no path on this machine is known."""

    def read_config(self) -> Mapping[str, Any]:
        """The configuration as transformers writes it; empty if it cannot be read here: vLLM will say what is wrong."""
        try:
            found = json.loads(self.config_file.read_bytes()) if self.config_file else {}
        except (OSError, ValueError, RecursionError):
            found = {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """A hub's answer. ``refusal``: why it does not give us the model. ``unreachable``: why there is no answer."""

    refusal: str | None = None
    unreachable: str | None = None


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub as its library knows it. ``ask``: asks about a model, and waits some seconds at most."""

    endpoint: str
    cache: Path
    is_offline: bool
    ask: Callable[[str], HubAnswer]


def find_model(name: str, environ: Mapping[str, str], hub: Callable[[], Hub] | None = None) -> ModelSource:
    """Finds the model. Waits some seconds at most for a hub. ``hub``: makes the hub, if one has to be asked."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's own raises for a user who does not exist
    if path.exists():
        return ModelSource(str(path.resolve()), problem=_folder_problem(path), config_file=path / "config.json")
    if name.startswith(("/", ".", "~")):
        return ModelSource(name, problem=f"model {path} does not exist: {_WANTED}")
    if "://" in name:
        return ModelSource(name)  # An object store, which vLLM's loader reads.
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() in _YES:
        return _on_modelscope(name)
    return _on_hub(name, (hub or hub_of_environment)())


def hub_of_environment() -> Hub:
    """The hub of ``HF_ENDPOINT``, ``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE``, which the library reads."""
    constants: Any = import_module("huggingface_hub.constants")
    endpoint = str(constants.ENDPOINT)
    return Hub(endpoint, Path(constants.HF_HUB_CACHE), bool(constants.HF_HUB_OFFLINE), partial(ask_hub, endpoint))


def _folder_problem(path: Path) -> str | None:
    if path.is_file():
        return None if path.suffix == ".gguf" else f"model {path} is no folder: {_WANTED}"
    if any(True for pattern in _CONFIGS for _ in path.glob(pattern)):
        return None
    return f"model {path} has no config.json: {_WANTED}"


def _on_modelscope(name: str) -> ModelSource:
    if importlib.util.find_spec("modelscope") is None:
        cure = "pip install modelscope, or unset it"
        return ModelSource(name, problem=f"VLLM_USE_MODELSCOPE is set and modelscope is not installed: {cure}")
    return ModelSource(name)


def _on_hub(name: str, hub: Hub) -> ModelSource:
    repository = name.partition(":")[0]  # vLLM takes ORG/MODEL:QUANTISATION for GGUF
    is_cached = has_copy(hub.cache, repository)
    config = _cached_config(hub.cache, repository)
    if hub.is_offline:
        return ModelSource(name, problem=None if is_cached else _offline_problem(name, hub), config_file=config)
    answer = hub.ask(repository)
    if answer.refusal:
        return ModelSource(name, problem=f"model {name} is no folder here, and {hub.endpoint} says: {answer.refusal}")
    if not answer.unreachable:
        return ModelSource(name, config_file=config)
    if is_cached:
        remark = f"no way to {hub.endpoint} ({answer.unreachable}): the copy in {hub.cache} is served"
        return ModelSource(name, remark=remark, env={"HF_HUB_OFFLINE": "1"}, config_file=config)
    return ModelSource(name, problem=_unreachable_problem(name, hub, answer.unreachable))


def has_copy(cache: Path, repository: str) -> bool:
    """Whether the hub's cache has the configuration, at least, of some revision of the model."""
    snapshots = _folder_of(cache, repository) / "snapshots"
    return any(True for pattern in _CONFIGS for _ in snapshots.glob(f"*/{pattern}"))


def _cached_config(cache: Path, repository: str) -> Path | None:
    """``config.json`` of the newest revision that was downloaded; None: the cache has none."""
    folder = _folder_of(cache, repository)
    try:
        file = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
    except OSError:
        return None
    return file if file.is_file() else None


def _folder_of(cache: Path, repository: str) -> Path:
    return cache / f"models--{repository.replace('/', '--')}"


def _offline_problem(name: str, hub: Hub) -> str:
    return (
        f"model {name} is no folder here and not in {hub.cache}, and HF_HUB_OFFLINE is set: "
        "give a folder, unset it, or set HF_HOME to where the model was downloaded"
    )


def _unreachable_problem(name: str, hub: Hub, why: str) -> str:
    return (
        f"model {name} is no folder here and not in {hub.cache}, and there is no way to {hub.endpoint} ({why}): "
        "give a folder, or set HF_ENDPOINT or HTTPS_PROXY"
    )


def ask_hub(endpoint: str, repository: str) -> HubAnswer:
    """This hub's answer about the model."""
    hub: Any = import_module("huggingface_hub")
    errors: Any = import_module("huggingface_hub.errors")
    transport_error = errors.HfHubHTTPError.__bases__[0]  # the base error of the HTTP library that this version uses
    try:
        hub.HfApi(endpoint=endpoint).model_info(repository, timeout=HUB_TIMEOUT_S)
    except errors.HFValidationError:
        return HubAnswer(refusal="its models are called ORG/MODEL")
    except errors.GatedRepoError:
        return HubAnswer(refusal="it is gated: ask for access there, and set HF_TOKEN")
    except errors.HfHubHTTPError as error:
        return _refused(error, error.response.status_code)
    except (OSError, transport_error) as error:
        return HubAnswer(unreachable=_first_line(error))
    return HubAnswer()


def _refused(error: Exception, status: int) -> HubAnswer:
    """The answer for an HTTP status: mirrors of a hub use its statuses, but not its error messages."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
        return HubAnswer(refusal=f"{status}, no such model or a private one: check the name, or set HF_TOKEN")
    return HubAnswer(unreachable=_first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
