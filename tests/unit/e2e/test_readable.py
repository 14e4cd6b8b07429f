"""What pods may read, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.command import main
from e2e.readable import copy_readable, let_others_read

from pdcluster_cli.tiny_model import ensure_folder


@pytest.fixture
def shut() -> Iterator[None]:
    """What is made is its owner's alone."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("shut")
def test_a_model_that_is_its_owners_alone_is_copied_for_all(tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    model.mkdir()
    kept.write_text("weights")
    (model / "config.json").write_text("{}")
    (model / "weights").symlink_to(kept)
    copy = ensure_folder(tmp_path / "cache" / "model", lambda folder: copy_readable(model, folder))
    assert {path.name: (mode(path), path.is_symlink()) for path in copy.iterdir()} == {
        "config.json": (0o644, False),
        "weights": (0o644, False),
    }
    assert mode(copy) == 0o755
    assert (copy / "weights").read_text() == "weights"
    assert (mode(model), mode(model / "config.json"), mode(kept)) == (0o700, 0o600, 0o600)


@pytest.mark.usefixtures("shut")
def test_what_a_run_makes_may_be_read_by_pods() -> None:
    """With a cluster of somebody's it only starts pytest."""
    assert main(["--version"], {"KUBECONFIG": "nowhere"}) == 0
    assert os.umask(0o077) == 0o022


@pytest.mark.usefixtures("shut")
def test_what_a_link_leads_to_keeps_its_mode(tmp_path: Path) -> None:
    outside, ours = tmp_path / "outside", tmp_path / "ours"
    (ours / "sub").mkdir(parents=True)
    (ours / "sub" / "file").touch()
    outside.mkdir()
    (outside / "program").touch(mode=0o711)
    (ours / "program").symlink_to(outside / "program")
    (ours / "folder").symlink_to(outside)
    (ours / "nowhere").symlink_to(tmp_path / "nothing")
    let_others_read(ours)
    assert (mode(ours / "sub"), mode(ours / "sub" / "file")) == (0o755, 0o644)
    assert (mode(outside), mode(outside / "program")) == (0o700, 0o700)
