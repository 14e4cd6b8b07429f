"""The compiled pass is taken for the host's own memory alone, and reads nothing outside of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Final

import pytest
import torch

from fakes.async_device import async_device
from pdcluster_connector.worker import content_loop
from pdcluster_connector.worker.content_loop import PlainPass, compiled_loop, loop_for
from pdcluster_connector.worker.content_pass import Pages, PartSums, factors_of
from pdcluster_protocol.params import ContentCheck

pytestmark = pytest.mark.long  # Numba compiles, and new processes import PyTorch: half a minute.

PAGES, HEADS, TOKENS, WORDS = 4, 2, 3, 2


def plain_pass(sums: PartSums) -> PlainPass | None:
    """With the compiled loop at hand."""
    return content_loop.plain_pass(sums, compiled_loop())


class Foreign(torch.Tensor):
    """Of a type whose operations may run later."""


def sums_of(numbers: list[int], content: torch.Tensor | None = None) -> PartSums:
    whole = torch.arange(PAGES * HEADS * TOKENS * WORDS).view(PAGES, HEADS, TOKENS, WORDS)
    places = (len(numbers), TOKENS)
    pages = Pages(torch.tensor(numbers), torch.ones(places, dtype=torch.int64), torch.zeros(places, dtype=torch.int64))
    rows, heads = torch.zeros(HEADS, dtype=torch.int64), torch.ones(HEADS, 1, dtype=torch.int64)
    cells = whole if content is None else content
    return PartSums(cells, pages, factors_of(cells), None, heads, rows, torch.zeros(1, dtype=torch.int64))


def test_plain_memory_is_read_by_the_compiled_pass() -> None:
    assert isinstance(plain_pass(sums_of([0, 3])), PlainPass)


def test_memory_that_vllm_has_made_in_inference_mode_is_plain_too() -> None:
    with torch.inference_mode():
        content = torch.arange(PAGES * HEADS * TOKENS * WORDS).view(PAGES, HEADS, TOKENS, WORDS)
    ours, theirs = sums_of([0, 3], content), sums_of([0, 3])
    plain = plain_pass(ours)
    assert plain is not None
    plain.add(slice(None))
    theirs.add_by_operators(slice(None))
    assert torch.equal(ours.rows, theirs.rows)


@pytest.mark.parametrize("numbers", [[0, PAGES], [-1], [1 << 62], [2, -(1 << 62), 1]])
def test_a_page_that_there_is_not_is_an_error_both_ways(numbers: list[int]) -> None:
    sums = sums_of(numbers)
    with pytest.raises(IndexError):
        sums.add_by_operators(slice(None))
    with pytest.raises(IndexError, match="4"):
        plain_pass(sums)
    assert not sums.rows.any()


def test_a_range_that_there_is_not_is_an_error_both_ways() -> None:
    sums = sums_of([0])
    pages = replace(sums.pages, slots=sums.pages.slots + 1)
    with pytest.raises(IndexError):
        replace(sums, pages=pages).add_by_operators(slice(None))
    with pytest.raises(IndexError, match="range"):
        plain_pass(replace(sums, pages=pages))


def test_sums_of_other_rows_than_there_are_is_an_error() -> None:
    with pytest.raises(IndexError, match="2 rows"):
        plain_pass(replace(sums_of([0]), rows=torch.zeros(1, dtype=torch.int64)))


def test_weights_of_other_tokens_than_there_are_stay_with_pytorch() -> None:
    sums = sums_of([0])
    weights = torch.ones(1, TOKENS + 1, dtype=torch.int64)
    assert plain_pass(replace(sums, pages=replace(sums.pages, weights=weights))) is None


def test_bytes_that_are_no_whole_words_stay_with_pytorch() -> None:
    content = torch.zeros(PAGES, HEADS, TOKENS, 12, dtype=torch.uint8)
    assert plain_pass(sums_of([0], content)) is None


def test_memory_of_another_type_stays_with_pytorch() -> None:
    """It may have work under way beside the host, as the memory of our tests' device has, though it says it is CPU."""
    sums = sums_of([0])
    assert plain_pass(replace(sums, content=sums.content.as_subclass(Foreign))) is None
    with async_device() as (_, runtime):
        assert plain_pass(replace(sums, content=runtime.tensor(sums.content))) is None


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_another_device_has_begun_is_not_used_for_the_host(*, is_compiled: bool) -> None:
    """It says that it is "cpu" too, and has asked for the same cells."""
    with async_device() as (_, runtime):
        with runtime.default:
            factors_of(sums_of([0]).content)
        sums = sums_of([0, 1])
        plain = plain_pass(sums) if is_compiled else None
        assert is_compiled is (plain is not None)
        (plain.add if plain else sums.add_by_operators)(slice(None))
        assert sums.rows.all()


def test_memory_of_another_device_stays_with_pytorch() -> None:
    sums = sums_of([0])
    assert plain_pass(replace(sums, content=sums.content.to("meta"))) is None


def test_a_rank_has_a_loop_only_where_all_sums_of_plain_memory_are_to_be_found() -> None:
    plain, foreign = torch.zeros(1), torch.zeros(1).as_subclass(Foreign)
    assert loop_for([plain], ContentCheck.FULL) is compiled_loop()
    assert loop_for([plain], ContentCheck.SAMPLED) is None
    assert loop_for([plain], ContentCheck.OFF) is None
    assert loop_for([foreign, plain.to("meta")], ContentCheck.FULL) is None


HINDRANCES: Final = (
    "sys.modules['numba'] = None",
    "os.environ['NUMBA_DISABLE_JIT'] = '1'",
    "sys.modules['numba'] = types.ModuleType('numba')  # of a version that has other names",
    "import numba; numba.njit = lambda *_, **__: 1 / 0  # its compiler fails",
)
WITHOUT_NUMBA: Final = """
import os, sys, types
import torch  # takes seconds: once for all
def try_with(hindrance):
    exec(hindrance)
    from unit.connector.worker.test_content_loop import plain_pass, sums_of
    assert plain_pass(sums_of([0])) is None, hindrance
for hindrance in sys.argv[1:]:
    if not (child := os.fork()):
        try_with(hindrance)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, hindrance
"""


def test_without_numba_pytorch_finds_the_sums() -> None:
    """Each hindrance in a process of its own."""
    run_alone(WITHOUT_NUMBA, *HINDRANCES)


def test_what_an_engine_imports_does_not_import_numba() -> None:
    """Only plain CPU memory needs it: an accelerator's engine does not wait for it."""
    code = "import sys, pdcluster_connector.worker.content_sums; assert 'numba' not in sys.modules"
    run_alone(code)


def run_alone(code: str, *arguments: str) -> None:
    """In a Python that has imported nothing yet."""
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=env)
