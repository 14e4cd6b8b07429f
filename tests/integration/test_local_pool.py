"""The start of a local pool ends in time, whatever an engine does, and says which one it was and why."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.ports import fresh_port
from patience import until
from pdcluster_cli.local.pool import PoolProcess, wait_ready
from pdcluster_cli.processes.waiting import EngineDied, NotReady
from pdcluster_cli.processes.zygote import EngineSpec, Zygote

RAISED = 'Traceback (most recent call last):\\n  File "a.py", line 1, in f\\nValueError: rank 1 is missing'
HANGS = f"import signal\nprint('{RAISED}', flush=True)\nprint('Waiting for rank 1', flush=True)\nsignal.pause()"
HANGS_WITHOUT_A_WORD = "import signal\nsignal.pause()"
DIES = "raise RuntimeError('no such device')"


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    with Zygote(["json"], env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "zygote.log") as started:
        yield started


def member(zygote: Zygote, folder: Path, name: str, code: str) -> PoolProcess:
    (folder / f"{name}_module.py").write_text(code)
    spec = EngineSpec(name, f"{name}_module", (), {}, folder / f"{name}.log")
    return PoolProcess(name, fresh_port(), zygote.start_engine(spec))


def wait(members: list[PoolProcess], timeout_s: float) -> None:
    wait_ready(members, members, lambda _: None, deadline=time.monotonic() + timeout_s)


@pytest.mark.parametrize(
    ("code", "cause", "last"),
    [
        (HANGS, "ValueError: rank 1 is missing", "Waiting for rank 1"),
        (HANGS_WITHOUT_A_WORD, "its log holds no error", ""),
    ],
    ids=["with a cause", "without"],
)
def test_an_engine_that_hangs_is_named_at_the_deadline_with_its_cause_and_last_lines(
    zygote: Zygote, tmp_path: Path, code: str, cause: str, last: str
) -> None:
    hanging = member(zygote, tmp_path, "decode", code)
    log = tmp_path / "decode.log"
    assert until(lambda: log.exists() and last in log.read_text()), "the engine has not come so far"
    with pytest.raises(NotReady) as found:
        wait([hanging], timeout_s=3.0)
    first, *tail = str(found.value).splitlines()
    seconds = re.search(r"\d+", first)
    assert seconds
    assert int(seconds[0]) >= 3  # what a busy machine adds is told too
    assert first == f"decode is not ready after {seconds[0]} s: {cause}; the end of {tmp_path}/decode.log:"
    assert last in "".join(tail[-1:])


def test_an_engine_that_dies_is_told_at_once_beside_one_that_hangs(zygote: Zygote, tmp_path: Path) -> None:
    members = [member(zygote, tmp_path, "prefill", HANGS), member(zygote, tmp_path, "decode", DIES)]
    with pytest.raises(EngineDied, match="decode has ended with status 1: RuntimeError: no such device; the end of "):
        wait(members, timeout_s=600.0)


def test_a_killed_engine_that_left_no_word_is_told_what_kills(zygote: Zygote, tmp_path: Path) -> None:
    killed = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(
        EngineDied, match="signal 9: killed from outside, as the kernel does when memory runs out; the end"
    ):
        wait([member(zygote, tmp_path, "decode", killed)], timeout_s=600.0)


def test_what_kills_is_no_error_that_the_log_held_before(zygote: Zygote, tmp_path: Path) -> None:
    """Who is killed has no time to say why: what the log holds is of another hour."""
    code = f"import os, signal\nprint('{RAISED}', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(EngineDied, match="decode has ended with signal 9: killed from outside"):
        wait([member(zygote, tmp_path, "decode", code)], timeout_s=600.0)
