"""A stand-in for ``torch_npu``: what vllm-ascend 0.23.0.post1 needs to be imported, and to make KV tensors on a CPU.

On ``PYTHONPATH`` of ``tests.ascend.record`` alone. It has no operator: whatever is not here exists as a name, so that
an import or an annotation may say it, and raises when it is called. ``torch.npu``, which torch_npu adds to PyTorch, is
the same. There is no device: ``torch.npu.is_available()`` is False.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

import torch


class NotOnCpu:
    """A name of torch_npu that nothing here stands for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NotOnCpu:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return NotOnCpu(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} needs an NPU")

    def __or__(self, other: Any) -> NotOnCpu:
        """As a part of an annotation, ``Event | None``."""
        return self

    __ror__ = __or__


class _Npu(ModuleType):
    """``torch.npu``."""

    def is_available(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NotOnCpu:
        if name.startswith("__"):
            raise AttributeError(name)
        return NotOnCpu(f"torch.npu.{name}")


def __getattr__(name: str) -> NotOnCpu:
    if name.startswith("__"):
        raise AttributeError(name)
    return NotOnCpu(f"torch_npu.{name}")


npu = _Npu("torch.npu")
sys.modules["torch.npu"] = npu
torch.npu = npu  # type: ignore[attr-defined]  # as torch_npu does
torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]  # not in __all__, but documented
