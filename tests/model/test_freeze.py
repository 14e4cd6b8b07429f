"""Parts of states are copied whatever else the same process has imported."""

from __future__ import annotations

import sys
from types import ModuleType

import msgspec
import pytest

from model.freeze import Store


class ModuleOfMissingLibrary(ModuleType):
    """As transformers' old names of its modules: asked for any name, they import what is not installed."""

    def __getattr__(self, name: str) -> object:
        raise ModuleNotFoundError(f"asked for {name}")


def test_a_copy_asks_no_other_module(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"an_old_name": ModuleOfMissingLibrary("an_old_name")} | sys.modules
    monkeypatch.setattr(sys, "modules", modules)
    store = Store()
    number = store.intern(part := {"seal": msgspec.UNSET})
    copy = store.copy(number)
    assert copy == part
    assert copy is not part
