"""Engines that store KV differently never write into each other."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.fingerprint import CURES, KvFingerprint, require_equal
from unit.protocol.messages import FINGERPRINT, any_message

FIELDS = [field.name for field in msgspec.structs.fields(KvFingerprint)]


def refusal_of(prefill: KvFingerprint, decode: KvFingerprint) -> str:
    with pytest.raises(ProtocolError) as refused:
        require_equal(prefill=prefill, decode=decode, prefill_id="p-0", decode_id="d-0")
    return str(refused.value)


def changed(**values: Any) -> KvFingerprint:
    return msgspec.structs.replace(FINGERPRINT, **values)


@given(any_message(KvFingerprint))
def test_equal_engines_may_push(fingerprint: KvFingerprint) -> None:
    twin = msgspec.json.decode(msgspec.json.encode(fingerprint), type=KvFingerprint)
    require_equal(prefill=fingerprint, decode=twin, prefill_id="p-0", decode_id="d-0")
    assert twin == fingerprint


def test_every_fact_is_compared_and_has_a_cure() -> None:
    assert list(CURES) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_a_difference_names_both_engines_both_values_and_the_cure(name: str) -> None:
    ours = getattr(FINGERPRINT, name)
    theirs = ours + 1 if isinstance(ours, int) else f"other {ours}"
    assert refusal_of(FINGERPRINT, changed(**{name: theirs})) == (
        f"prefill engine p-0 and decode engine d-0 differ in {name}: prefill {ours!r}, decode {theirs!r}: {CURES[name]}"
    )


def test_several_differences_are_all_named_with_the_first_cure() -> None:
    assert refusal_of(changed(layout="LBNHC", kv_dtype="bfloat16"), FINGERPRINT) == (
        "prefill engine p-0 and decode engine d-0 differ in "
        "kv_dtype: prefill 'bfloat16', decode 'float32'; layout: prefill 'LBNHC', decode 'LBHNC': "
        "start both with the same --dtype and --kv-cache-dtype"
    )


@given(any_message(KvFingerprint), any_message(KvFingerprint))
def test_it_passes_exactly_when_equal(prefill: KvFingerprint, decode: KvFingerprint) -> None:
    if prefill == decode:
        require_equal(prefill=prefill, decode=decode, prefill_id="p-0", decode_id="d-0")
    else:
        message = refusal_of(prefill, decode)
        assert all(
            (f"{name}: prefill " in message) == (getattr(prefill, name) != getattr(decode, name)) for name in FIELDS
        )
