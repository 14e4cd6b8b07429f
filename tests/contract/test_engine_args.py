"""vLLM's own parser: what the rules over ``engineArgs`` refuse would be read as an option, and no option is refused."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, get_args

import pytest
from vllm.config.parallel import DistributedExecutorBackend
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from pdcluster_cli.processes.parallelism import EXECUTORS
from pdcluster_operator.api.engine_args import (
    MAX_NAME_CHARACTERS,
    MAY_DIFFER,
    MUST_AGREE,
    OF_REPLICAS,
    ON_ONE_NODE,
    SET_ELSEWHERE,
)

NAMED: Final = (*MUST_AGREE, *MAY_DIFFER, *SET_ELSEWHERE, ON_ONE_NODE, OF_REPLICAS)


@cache
def parser() -> FlexibleArgumentParser:
    made: FlexibleArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


@cache
def options() -> dict[str, str]:
    """Every long name of an option, without dashes in front, with where its value goes."""
    found = {name: action.dest for action in parser()._actions for name in action.option_strings}
    return {name[2:]: dest for name, dest in found.items() if name.startswith("--")}


@pytest.mark.parametrize(
    ("word", "where", "value"),
    [
        ("--kv-cache_dtype=fp8", "kv_cache_dtype", "fp8"),
        ("--speculative_config.model=m", "speculative_config", {"model": "m"}),
        ("--hf-overrides.a+=1", "hf_overrides", {"a": ["1"]}),
        ("--hf-over.a=1", "hf_overrides", {"a": 1}),
        ("--block-s=32", "block_size", 32),
        ("--tensor-par=2", "tensor_parallel_size", 2),
        ("--no-disable-hyb", "disable_hybrid_kv_cache_manager", False),
    ],
)
def test_it_reads_other_spellings_as_the_option(word: str, where: str, value: Any) -> None:
    assert getattr(parser().parse_args(["--model=m", word]), where) == value


def test_it_has_every_option_that_rules_name_by_no_other_long_name() -> None:
    assert set(NAMED) <= set(options())
    for name in NAMED:
        names = {other for other, dest in options().items() if dest == options()[name]}
        assert names - {f"no-{name}"} == {name}


def test_each_of_its_options_has_a_name_that_may_be_written() -> None:
    whole = [name for name in options() if not name.startswith("no-")]
    assert [name for name in whole if not re.fullmatch(r"[a-z0-9-]+", name) or len(name) > MAX_NAME_CHARACTERS] == []
    assert [name for name in options() if name not in whole and name.removeprefix("no-") not in whole] == []


def test_none_of_its_options_is_taken_for_the_beginning_of_one_that_rules_name() -> None:
    beginnings = {name[:end] for name in NAMED for end in range(1, len(name))}
    assert beginnings & set(options()) <= set(NAMED)


def test_the_executors_that_pdcluster_local_takes_by_name_are_those_that_it_has() -> None:
    assert set(EXECUTORS) == set(get_args(DistributedExecutorBackend))
