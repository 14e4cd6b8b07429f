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


@pytest.mark.parametrize("method", ["mtp", "eagle", "draft_model"])
def test_decode_may_have_a_draft_model_alone(method: str) -> None:
    decode = changed(draft=f"{method} d-1", draft_heads=(4,), state="")
    require_equal(prefill=changed(draft="", draft_heads=(), state=""), decode=decode, prefill_id="p", decode_id="d")
    assert decode.all_kv_heads == (*FINGERPRINT.kv_heads, 4)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({}, {"draft": "extract_hidden_states d-1"}, id="a method that is not proven alone"),
        pytest.param({}, {"draft": "mtp d-1", "kv_dtype": "fp8"}, id="and something else"),
        pytest.param({"state": "f32"}, {"draft": "mtp d-1", "state": "f32"}, id="beside recurrent state"),
        pytest.param({"draft": "mtp d-1"}, {}, id="on prefill alone"),
        pytest.param({"draft": "mtp d-1"}, {"draft": "mtp d-2"}, id="another one on each"),
        pytest.param({"draft": "mtp d-1"}, {"draft": "mtp d-1", "draft_heads": (2,)}, id="other heads on each"),
    ],
)
def test_other_differences_of_draft_models_are_refused_with_both_values(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    plain = {"draft": "", "draft_heads": (), "state": ""}
    ours, theirs = changed(**{**plain, **prefill}), changed(**{**plain, **decode})
    said = refusal_of(ours, theirs)
    differing = [name for name in FIELDS if getattr(ours, name) != getattr(theirs, name)]
    assert [name for name in differing if f"{name}: prefill {getattr(ours, name)!r}, decode" not in said] == []
    assert said.endswith(CURES[differing[0]])


@given(any_message(KvFingerprint), any_message(KvFingerprint))
def test_it_passes_exactly_when_equal(prefill: KvFingerprint, decode: KvFingerprint) -> None:
    if prefill == decode:
        require_equal(prefill=prefill, decode=decode, prefill_id="p-0", decode_id="d-0")
    else:
        message = refusal_of(prefill, decode)
        assert all(
            (f"{name}: prefill " in message) == (getattr(prefill, name) != getattr(decode, name)) for name in FIELDS
        )
