"""Which files are an adapter's, and that their digest is their content's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdcluster_connector.adapter_files import CONFIG, WEIGHTS, FilesChanged, digest_of, files_of, folder_of
from pdcluster_connector.core.adapters import Files


def adapter(folder: Path, config: bytes = b"{}", weights: bytes = b"w" * 3_000_000, kind: str = WEIGHTS[0]) -> Files:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_bytes(config)
    (folder / kind).write_bytes(weights)
    found = files_of(str(folder))
    assert found is not None
    return found


def test_a_copy_in_another_folder_of_another_time_has_the_same_digest(tmp_path: Path) -> None:
    one, copy = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    os.utime(tmp_path / "b" / CONFIG, (1, 1))
    again = files_of(str(tmp_path / "b"))
    assert again is not None
    assert one != copy != again
    assert digest_of(one) == digest_of(again)


def test_any_other_content_has_another_digest(tmp_path: Path) -> None:
    found = [
        adapter(tmp_path / "a"),
        adapter(tmp_path / "b", weights=b"w" * 2_999_999 + b"v"),
        adapter(tmp_path / "c", config=b"{ }"),
        adapter(tmp_path / "d", kind=WEIGHTS[1]),
        adapter(tmp_path / "e", config=b"{}w", weights=b"w" * 2_999_999),
    ]
    assert len({digest_of(files) for files in found}) == len(found)


def test_the_weights_are_the_first_of_the_files_that_vllm_looks_for(tmp_path: Path) -> None:
    adapter(tmp_path, kind=WEIGHTS[2])
    adapter(tmp_path, kind=WEIGHTS[1])
    assert [stamp.name for stamp in adapter(tmp_path).stamps] == [CONFIG, WEIGHTS[0]]


def test_files_that_have_changed_since_the_stamp_have_no_digest(tmp_path: Path) -> None:
    old = adapter(tmp_path)
    (tmp_path / "new").write_bytes(b"v" * 3_000_000)
    (tmp_path / "new").replace(tmp_path / WEIGHTS[0])
    with pytest.raises(FilesChanged, match="load it again"):
        digest_of(old)


def test_a_folder_without_weights_or_configuration_has_no_files(tmp_path: Path) -> None:
    old = adapter(tmp_path)
    (tmp_path / CONFIG).unlink()
    assert files_of(str(tmp_path)) is None
    assert files_of(str(tmp_path / "nowhere")) is None
    assert files_of("/no file has this name\0") is None
    with pytest.raises(OSError, match=CONFIG):
        digest_of(old)


def test_a_path_is_a_folder_and_another_name_is_a_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert folder_of("/gone/away") == "/gone/away"
    assert folder_of("here") == str(tmp_path / "here")
    assert folder_of("~/sql") == str(Path.home() / "sql")
    assert folder_of("somebody/sql") is None
