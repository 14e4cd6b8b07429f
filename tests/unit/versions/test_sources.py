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


@pytest.mark.parametrize(
    ("module", "name", "member", "is_what"),
    [
        *(("vllm", name, None, VALUE) for name in ("Known", "LIMIT", "Derived", "Handed", "near", "inner")),
        ("vllm", "make", None, "first, *, only="),
        *((*gone, member, MISSING) for gone in (("vllm", "gone"), ("vllm.inner", "gone"), ("vllm.gone", "part"))
          for member in (None, "field")),
        *(("vllm", name, *row) for name in ("Handed", "near") for row in (
            *(("LIMIT", VALUE), ("field", VALUE), ("set_in_method", VALUE), ("size", VALUE)),
            *(("hook", "self, first, second=, *rest, only, **more"), ("keeps", "self, *, only, other=")),
            *(("make", "cls, name"), ("gone", MISSING), ("own", MISSING)))),
        *(("vllm", "Derived", *row) for row in (
            ("own", VALUE), ("set_in_method", VALUE), ("size", VALUE), ("hook", "self, first"))),
    ],
)  # fmt: skip
def test_a_name_and_a_classs_member_are_found_wherever_they_are_defined(
    site: Path, module: str, name: str, member: str | None, is_what: str
) -> None:
    """``Handed`` and ``near`` are one class that other modules hand on; ``Derived`` has what its bases have, and its
    own first."""
    assert look_up(site, module, name, member) == is_what
