"""What tells a fine-tuned model from its base."""

from __future__ import annotations

from pathlib import Path

from pdcluster_connector.weights import digest_weights


def test_weights_of_one_size_differ_by_their_bytes(tmp_path: Path) -> None:
    digests = set()
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes([number]) * 100_000)
        digests.add(digest_weights(folder))
    assert len(digests) == 3
    assert digest_weights(tmp_path / "0") in digests
    assert digest_weights(tmp_path / "no such folder") == ""
