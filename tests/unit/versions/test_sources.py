"""What is read from a library's source is what Python would find in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from versions.sources import MISSING, VALUE, look_up

PACKAGE = """
try:
    from deep import Known
except ImportError:
    Known = None
from vllm.inner.part import Base as Handed
from .inner import near
LIMIT: int = 3

def make(first, *, only=None): ...

class Derived(Handed[int]):
    own: int
    def hook(self, first): ...
"""
PART = """
class Base:
    LIMIT = 3
    field: int = 1
    if True:
        def __init__(self): self.set_in_method: int = 1
    def hook(self, first, second=1, *rest, only, **more): ...
    def keeps(self, *, only, other=1): ...
    @property
    def size(self): ...
    @classmethod
    def make(cls, name): ...
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    inner = tmp_path / "vllm" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(PACKAGE)
    (inner / "__init__.py").write_text("from .part import Base as near\n")
    (inner / "part.py").write_text(PART)
    return tmp_path


@pytest.mark.parametrize("name", ["Known", "LIMIT", "Derived", "Handed", "near", "inner"])
def test_a_name_is_found_wherever_it_is_defined(site: Path, name: str) -> None:
    assert look_up(site, "vllm", name) == VALUE


def test_a_function_has_its_parameters(site: Path) -> None:
    assert look_up(site, "vllm", "make") == "first, *, only="


@pytest.mark.parametrize(("module", "name"), [("vllm", "gone"), ("vllm.inner", "gone"), ("vllm.gone", "part")])
def test_what_is_not_there_is_missing(site: Path, module: str, name: str) -> None:
    assert look_up(site, module, name) == look_up(site, module, name, "field") == MISSING


@pytest.mark.parametrize("name", ["Handed", "near"])
@pytest.mark.parametrize(
    ("member", "is_what"),
    [
        ("LIMIT", VALUE),
        ("field", VALUE),
        ("set_in_method", VALUE),
        ("size", VALUE),
        ("hook", "self, first, second=, *rest, only, **more"),
        ("keeps", "self, *, only, other="),
        ("make", "cls, name"),
        ("gone", MISSING),
        ("own", MISSING),
    ],
)
def test_a_member_is_found_in_a_class_that_another_module_hands_on(
    site: Path, name: str, member: str, is_what: str
) -> None:
    assert look_up(site, "vllm", name, member) == is_what


@pytest.mark.parametrize(
    ("member", "is_what"), [("own", VALUE), ("set_in_method", VALUE), ("size", VALUE), ("hook", "self, first")]
)
def test_a_class_has_what_its_bases_have_and_its_own_comes_first(site: Path, member: str, is_what: str) -> None:
    assert look_up(site, "vllm", "Derived", member) == is_what
