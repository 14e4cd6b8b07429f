"""The keys that one process keeps for those that start later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fakes.identity import AUDIENCE, ISSUER, key_set, signing_key
from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.clients.tokens.claims import TokenRules
from pdcluster_router.front.tokens.check import TokenCheck
from pdcluster_router.front.tokens.start import _recall, _take_and_keep

DOCUMENT = key_set(signing_key())
NOW = 1_800_000_000.0


def new_check(now: float = NOW) -> TokenCheck:
    return TokenCheck(TokenRules(ISSUER, AUDIENCE, "sub"), lambda: now)


def test_a_later_process_takes_the_keys_and_their_age(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    _take_and_keep(new_check(), kept, DOCUMENT)
    os.utime(kept, (NOW - 70, NOW - 70))
    later = new_check()
    assert later.problem
    _recall(later, kept)
    assert (later.problem, later.age_s()) == ("", 70)


def test_a_document_that_is_no_key_set_takes_the_place_of_none(tmp_path: Path) -> None:
    kept, check = tmp_path / "kept", new_check()
    _take_and_keep(check, kept, DOCUMENT)
    with pytest.raises(ConfigError):
        _take_and_keep(check, kept, b"<html>")
    assert kept.read_bytes() == DOCUMENT


def test_the_first_process_has_nothing_to_take(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = new_check()
    _recall(check, tmp_path / "kept")
    assert check.problem
    assert caplog.text == ""


@pytest.mark.parametrize("is_link", [True, False])
def test_keys_that_another_user_may_have_put_there_are_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_link: bool
) -> None:
    folder, check = tmp_path / "folder", new_check()
    folder.mkdir()
    _take_and_keep(new_check(), folder / "kept", DOCUMENT)
    if is_link:
        (folder / "link").symlink_to(folder / "kept")
    else:
        folder.chmod(0o777)
    _recall(check, folder / ("link" if is_link else "kept"))
    assert check.problem
    assert "token keys of another process not taken reason=" in caplog.text


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_file_that_cannot_be_used_is_told_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_folder: bool
) -> None:
    kept, check = tmp_path / "kept", new_check()
    if is_folder:
        kept.mkdir()
    else:
        kept.write_bytes(b"<html>")
    _recall(check, kept)
    assert check.problem
    assert "token keys of another process not taken reason=" in caplog.text


def test_a_disk_that_is_full_costs_this_process_no_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check = new_check()
    _take_and_keep(check, tmp_path / "gone" / "kept", DOCUMENT)
    assert check.problem == ""
    assert "token keys not kept" in caplog.text
