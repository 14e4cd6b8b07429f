"""What an engine may not be is said at its start, with the setting, its value and the cure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pdcluster_connector.vllm_facts import _require_whole_steps, _role, _weights_digest
from pdcluster_protocol.errors import ConfigError

WHOLE = {
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "use_ubatching": False,
}


def test_whole_steps_are_accepted() -> None:
    _require_whole_steps(SimpleNamespace(**WHOLE))


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "use_ubatching"])
def test_a_prompt_spread_over_ranks_is_refused_by_the_name_of_its_option(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} is 2.*needs 1"):
        _require_whole_steps(SimpleNamespace(**{**WHOLE, name: 2}))


def test_split_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="--enable-dbo"):
        _require_whole_steps(SimpleNamespace(**{**WHOLE, "use_ubatching": True}))


def test_an_engine_that_is_both_is_told_what_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"kv_both.*kv_producer.*kv_consumer"):
        _role("kv_both")


def test_weights_of_one_size_differ_by_their_bytes(tmp_path: Path) -> None:
    digests = set()
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([number]) * 100_000)
        digests.add(_weights_digest(folder))
    assert len(digests) == 3
    assert _weights_digest(tmp_path / "0") in digests
    assert _weights_digest(tmp_path / "no such folder") == ""
