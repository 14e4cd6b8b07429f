"""What is read from a library's source is what Python would find in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from versions.surface import _has, _methods

SOURCE = """
try:
    from deep import Known
except ImportError:
    Known = None
LIMIT: int = 3

def make(): ...

class Base:
    def hook(self, first, second=1, *rest, only, **more): ...
    @property
    def size(self): ...
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "vllm" / "inner").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(SOURCE)
    (tmp_path / "vllm" / "inner" / "part.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("name", ["Known", "LIMIT", "make", "Base"])
def test_a_name_is_found_wherever_it_is_defined(site: Path, name: str) -> None:
    assert _has(site, "vllm", name)


def test_a_module_is_a_name_of_its_package(site: Path) -> None:
    assert _has(site, "vllm.inner", "part")


@pytest.mark.parametrize(("module", "name"), [("vllm", "gone"), ("vllm.inner", "gone"), ("vllm.gone", "part")])
def test_what_is_not_there_is_missing(site: Path, module: str, name: str) -> None:
    assert not _has(site, module, name)


def test_a_hooks_parameters_are_as_callers_see_them() -> None:
    assert _methods(SOURCE, "Base") == {"hook": "self, first, second=, *rest, only, **more", "size": "self"}
