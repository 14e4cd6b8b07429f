"""Which adapters of two engines compute the same KV, and what is said of those that do not."""

from __future__ import annotations

import pytest

from pdcluster_protocol.adapters import AdapterContent, difference

SQL = AdapterContent("sql", "aa", "--lora-dtype float32")
RELOAD = "give both engines the same files, then reload the adapter on both (/v1/load_lora_adapter) or restart them"


def between(prefill: AdapterContent | None, decode: AdapterContent | None) -> str:
    return difference(prefill=prefill, decode=decode, prefill_id="p-1", decode_id="d-1")


def test_no_adapter_and_adapters_of_equal_content_do_not_differ_whatever_their_names() -> None:
    assert between(None, None) == between(SQL, SQL) == between(SQL, AdapterContent("other", "aa", SQL.use)) == ""


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (SQL, AdapterContent("sql", "bb", SQL.use), ("'sql' of content aa", "'sql' of content bb")),
        (SQL, None, ("'sql' of content aa", "no LoRA adapter")),
        (None, SQL, ("no LoRA adapter", "'sql' of content aa")),
    ],
)
def test_other_content_is_told_with_both_engines_both_values_and_the_cure(
    prefill: AdapterContent | None, decode: AdapterContent | None, said: tuple[str, str]
) -> None:
    one, other = (what if what.startswith("no") else f"LoRA adapter {what}" for what in said)
    assert between(prefill, decode) == (
        f"prefill engine p-1 computes with {one}, decode engine d-1 with {other}: {RELOAD}"
    )


def test_equal_files_that_engines_use_otherwise_are_told_with_both_options() -> None:
    assert between(SQL, AdapterContent("sql", "aa", "--lora-dtype bfloat16")) == (
        "prefill engine p-1 uses LoRA adapter 'sql' with --lora-dtype float32, decode engine d-1 with "
        "--lora-dtype bfloat16: start both with the same LoRA options"
    )
