"""Which change moves which hash."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_cases.refused import ALIKE
from pdcluster_operator.core.revision import Json, revision_of, template_of
from pdcluster_protocol.labels import Role

MODEL: Final[dict[str, Json]] = {"name": "Qwen/Qwen3-8B", "servedName": "qwen", "revision": None}
TRANSFER: Final[dict[str, Json]] = {"protocol": "tcp", "port": 15000, "onFailure": "recompute"}
ARGS: Final[dict[str, Json]] = {"block-size": "32", "max-num-seqs": "64"}

DANGEROUS: Final = (*ALIKE, "enable-prefix-caching", "kv-sharing-fast-prefill")
"""By name, not from the product's own list: one that were taken out of it would be missed by nobody."""
LAYOUT: Final = "VLLM_SSM_CONV_STATE_LAYOUT"
VARIABLES: Final = (
    LAYOUT, "VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE", "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
)  # fmt: skip

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
TREES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)),
    max_size=5,
)


def revision(
    model: dict[str, Json] | None = None,
    image: str = "pdcluster:1",
    transfer: dict[str, Json] | None = None,
    prefill: dict[str, Json] | None = None,
    decode: dict[str, Json] | None = None,
    prefill_env: dict[str, Json] | None = None,
    decode_env: dict[str, Json] | None = None,
    tls: dict[str, Json] | None = None,
) -> str:
    """Of a plain cluster with these changes."""
    return revision_of(
        model={**MODEL, **(model or {})},
        image=image,
        transfer={**TRANSFER, **(transfer or {})},
        engine_args={Role.PREFILL: {**ARGS, **(prefill or {})}, Role.DECODE: {**ARGS, **(decode or {})}},
        env={Role.PREFILL: prefill_env or {}, Role.DECODE: decode_env or {}},
        tls=tls,
    )


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(revision(model={"name": "Qwen/Qwen3-14B"}), id="model"),
        pytest.param(revision(model={"revision": "abc"}), id="the model's revision"),
        pytest.param(revision(image="pdcluster:2"), id="image"),
        pytest.param(revision(transfer={"port": 15001}), id="transfer"),
        pytest.param(revision(prefill={"block-size": "16"}, decode={"block-size": "16"}), id="block size of both"),
        pytest.param(revision(decode={"block-size": "16"}), id="block size of one"),
        pytest.param(revision(prefill_env={LAYOUT: "SD"}, decode_env={LAYOUT: "SD"}), id="a layout of both"),
        pytest.param(revision(decode_env={LAYOUT: "SD"}), id="a layout of one"),
        pytest.param(revision(tls={"secretName": "a"}), id="TLS"),
    ],
)
def test_what_both_roles_share_moves_the_revision(changed: str) -> None:
    assert changed != revision()


@pytest.mark.parametrize(
    "unchanged",
    [
        pytest.param(revision(decode={"max-num-seqs": "256"}), id="how many requests at a time"),
        pytest.param(revision(decode={"tensor-parallel-size": "8"}), id="TP: any pairs with any"),
        pytest.param(revision(prefill={"gpu-memory-utilization": "0.9"}), id="memory"),
        pytest.param(revision(decode_env={"VLLM_LOGGING_LEVEL": "DEBUG"}), id="a variable that shapes no KV"),
        pytest.param(revision(model={"path": None}), id="a field that is absent"),
        pytest.param(revision(decode={"block-size-like": "1"}), id="a name that only begins alike"),
    ],
)
def test_what_concerns_one_role_does_not_move_the_revision(unchanged: str) -> None:
    assert unchanged == revision()


def test_exchanging_the_roles_arguments_moves_the_revision() -> None:
    assert revision(prefill={"dtype": "half"}) != revision(decode={"dtype": "half"})


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_would_make_kv_or_prompts_mean_something_else_moves_the_revision(name: str) -> None:
    assert revision(decode={name: "x"}) != revision()


def test_exchanging_the_roles_variables_moves_the_revision() -> None:
    assert revision(prefill_env={LAYOUT: "SD"}) != revision(decode_env={LAYOUT: "SD"})


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_keeps_kv_another_way_moves_the_revision(name: str) -> None:
    assert len({revision(decode_env={name: "1"}), revision(decode_env={name: "0"}), revision()}) == 3


def test_any_change_of_a_pod_template_moves_the_template() -> None:
    container: dict[str, Json] = {"name": "engine", "args": ["--a", "--b"]}
    seen = {
        template_of({"spec": {"containers": [container]}}),
        template_of({"spec": {"containers": [{**container, "args": ["--b", "--a"]}]}}),
        template_of({"spec": {"containers": [{**container, "image": ""}]}}),
        template_of({"spec": {"containers": []}}),
    }
    assert len(seen) == 4


@given(TREES, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(tree: dict[str, Json], chance: Random) -> None:
    keys = list(tree)
    chance.shuffle(keys)
    assert template_of({key: tree[key] for key in keys}) == template_of(tree)


@given(TREES)
def test_hashes_are_8_lower_case_hex_digits(tree: dict[str, Json]) -> None:
    digits = template_of(tree)
    assert len(digits) == 8
    assert set(digits) <= set("0123456789abcdef")


def test_hashes_are_the_same_in_another_process_and_in_every_release() -> None:
    """A release that moved them would restart every engine of every user."""
    assert template_of({"a": 1, "b": [None, "ä", {"c": None}]}) == "36476c52"
    program = "from pdcluster_operator.core.revision import template_of; print(template_of({'a': 1, 'b': [True, 2]}))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert printed.strip() == template_of({"b": [True, 2], "a": 1})


def test_a_number_that_json_cannot_write_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        template_of({"a": float("nan")})
