"""An engine's certificate is copied as its mounted Secret changes, into the same files, and never a broken one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from fakes.certificates import FOR_CLIENTS, Authority
from fakes.mounted_secret import MountedSecret
from patience import PATIENCE_S, until
from pdcluster_cli.pod import mirror as mirror_module
from pdcluster_cli.pod.mirror import Mirror, NotCopied, main


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority.crt")


@pytest.fixture
def secret(tmp_path: Path, authority: Authority) -> MountedSecret:
    return MountedSecret(tmp_path / "secret", authority, authority.issue())


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    folder = tmp_path / "copies"
    folder.mkdir()
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_each_renewal_is_written_into_the_same_files_which_only_their_owner_reads(
    secret: MountedSecret, copies: Path, authority: Authority
) -> None:
    mirror = Mirror(secret.folder, copies)
    assert mirror.update()
    files = {path.name: path.stat().st_ino for path in copies.iterdir()}
    for _ in range(3):
        assert not mirror.update()
        secret.publish(authority.issue())
        assert mirror.update()
        assert content_of(copies) == secret.content()
        assert {path.name: path.stat().st_ino for path in copies.iterdir()} == files
    assert {path.stat().st_mode & 0o777 for path in copies.iterdir()} == {0o600}


def test_a_renewal_that_takes_the_old_folder_away_while_it_is_read_is_no_broken_certificate(
    secret: MountedSecret, copies: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_come, check = [authority.issue()], mirror_module._check

    def renew_and_check(folder: Path) -> None:
        for issued in to_come:
            secret.publish(issued)
        to_come.clear()
        check(folder)

    monkeypatch.setattr(mirror_module, "_check", renew_and_check)
    assert Mirror(secret.folder, copies).update()
    assert content_of(copies) == secret.content()


def test_a_copy_that_cannot_be_written_is_not_called_a_broken_certificate(
    secret: MountedSecret, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    with pytest.raises(NotCopied, match=f"^the copy in {away} cannot be written: "):
        Mirror(secret.folder, away).update()


def test_a_shorter_certificate_leaves_nothing_of_the_longer_one(
    secret: MountedSecret, copies: Path, authority: Authority
) -> None:
    mirror = Mirror(secret.folder, copies)
    secret.publish(authority.issue(issuer=authority.middle()))
    mirror.update()
    secret.publish(authority.issue())
    mirror.update()
    assert content_of(copies) == secret.content()


def test_what_is_no_pair_is_not_copied(secret: MountedSecret, copies: Path, authority: Authority) -> None:
    mirror = Mirror(secret.folder, copies)
    mirror.update()
    good = content_of(copies)
    secret.publish(authority.issue(), key=authority.issue())
    with pytest.raises(NotCopied, match="KEY_VALUES_MISMATCH"):
        mirror.update()
    shutil.rmtree(secret.folder)
    with pytest.raises(NotCopied, match="No such file or directory"):
        mirror.update()
    assert content_of(copies) == good


def test_a_certificate_that_no_peer_would_take_is_not_copied(
    secret: MountedSecret, copies: Path, authority: Authority, tmp_path: Path
) -> None:
    """Routers keep the good one before it as well, so both ends go on with a pair that is still valid."""
    mirror = Mirror(secret.folder, copies)
    mirror.update()
    good = content_of(copies)
    for bad, why in (
        (authority.issue(begins=timedelta(days=-2), ends=timedelta(days=-1)), "certificate has expired"),
        (authority.issue(begins=timedelta(days=1), ends=timedelta(days=2)), "certificate is not yet valid"),
        (authority.issue(usage=FOR_CLIENTS), "unsuitable certificate purpose"),
        (Authority(tmp_path / "other.crt", "other").issue(), "unable to get local issuer certificate"),
    ):
        secret.publish(bad)
        with pytest.raises(NotCopied, match=why):
            mirror.update()
    assert content_of(copies) == good


def test_a_copy_that_was_cut_short_is_written_again_also_from_the_secret_of_before(
    secret: MountedSecret, copies: Path, authority: Authority
) -> None:
    mirror, first = Mirror(secret.folder, copies), authority.issue()
    secret.publish(first)
    mirror.update()
    (copies / "tls.crt").rename(copies / "away")
    (copies / "tls.crt").mkdir()  # The key can be written, and its certificate not, as if memory were full.
    secret.publish(authority.issue())
    with pytest.raises(NotCopied):
        mirror.update()
    (copies / "tls.crt").rmdir()
    (copies / "away").rename(copies / "tls.crt")
    secret.publish(first)
    assert mirror.update()
    assert content_of(copies) == secret.content()


def test_without_a_certificate_no_engine_is_started(
    secret: MountedSecret, copies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (secret.folder / "..data" / "ca.crt").unlink()
    assert main(["--source", str(secret.folder), "--target", str(copies), "--", "false"]) == 2
    assert "pdcluster mirror: the certificate in " in capsys.readouterr().err


def test_a_program_that_does_not_exist_is_named_and_nothing_of_the_mirror_stays(
    secret: MountedSecret, copies: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--source", str(secret.folder), "--target", str(copies), "--interval-s", "0.01"]
    fork, forked = os.fork, list[int]()

    def noted() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", noted)
    assert main([*words, "--", "/no/such/vllm"]) == 2
    assert capsys.readouterr().err == "pdcluster mirror: /no/such/vllm cannot be started: No such file or directory\n"
    with pytest.raises(ChildProcessError):
        os.waitpid(forked[0], os.WNOHANG)


def test_a_machine_that_has_no_room_for_a_process_is_named(
    secret: MountedSecret, copies: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    assert main(["--source", str(secret.folder), "--target", str(copies), "--", sys.executable]) == 2
    assert "cannot be started: Resource temporarily unavailable" in capsys.readouterr().err


ENGINE = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def test_the_engine_is_this_process_and_its_end_is_the_copys_end(
    secret: MountedSecret, copies: Path, authority: Authority
) -> None:
    words = ["mirror", "--source", str(secret.folder), "--target", str(copies), "--interval-s", "0.01"]
    command = [sys.executable, "-m", "pdcluster_cli", *words, "--", sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        assert int(engine.stdout.readline()) == engine.pid
        secret.publish(authority.issue())
        assert b"the certificate has changed, and its copy too" in engine.stderr.readline()
        assert content_of(copies) == secret.content()
        secret.publish(authority.issue(), key=authority.issue())
        assert b"the engine keeps the one that it has" in engine.stderr.readline()
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(PATIENCE_S) == -signal.SIGTERM
        began_at = time.monotonic()
        assert engine.stderr.read() == b"", "the child had it open"
        assert time.monotonic() - began_at < PATIENCE_S


def test_it_goes_on_where_its_words_are_not_read(secret: MountedSecret, copies: Path, authority: Authority) -> None:
    words = ["mirror", "--source", str(secret.folder), "--target", str(copies), "--interval-s", "0.01"]
    command = [sys.executable, "-m", "pdcluster_cli", *words, "--", sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        engine.stdout.readline()
        engine.stderr.close()
        try:
            for _ in range(3):
                secret.publish(authority.issue())
                assert until(lambda: content_of(copies) == secret.content())
        finally:
            engine.kill()
