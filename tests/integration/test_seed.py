"""The process whose forks are the workers of a test run, with real processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest

from integration.processes import PYTHON_PATH, is_running
from patience import PATIENCE_S, until
from pdcluster_cli.processes.zygote import EngineSpec
from seed.orders import WORKER, Fork, SeedError
from seed.start import Seed, SeededZygote


@pytest.fixture
def seed() -> Iterator[Seed]:
    with Seed(["json"]) as seed:
        yield seed


class Asked:
    """A worker that runs one line of Python, and what it writes."""

    def __init__(self, seed: Seed, line: str, env: Mapping[str, str] = os.environ) -> None:
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        self.stdin: IO[str] = os.fdopen(stdin_write, "w")
        self.stdout: IO[str] = os.fdopen(stdout_read)
        self.fork = Fork(seed.path, WORKER, (stdin_read, stdout_write, stdout_write), env)
        os.close(stdin_read)
        os.close(stdout_write)
        print(repr(line), file=self.stdin, flush=True)


def test_a_worker_is_what_python_would_be_and_its_status_is_told(seed: Seed) -> None:
    line = "import os, sys; print(dict(os.environ), 'json' in sys.modules, __name__, sys.argv); sys.exit(3)"
    asked = Asked(seed, line, {"ONLY": "this"})
    assert asked.stdout.read() == "{'ONLY': 'this'} True __main__ ['-c']\n"
    assert asked.fork.wait(PATIENCE_S) == 3


def test_a_worker_that_raises_ends_with_status_1_and_a_traceback(seed: Seed) -> None:
    asked = Asked(seed, "1 / 0")
    assert "ZeroDivisionError" in asked.stdout.read()
    assert asked.fork.wait(PATIENCE_S) == 1


def test_exit_functions_of_a_worker_are_called_and_its_output_is_whole(seed: Seed) -> None:
    asked = Asked(seed, "import atexit; atexit.register(print, 'last'); print('first')")
    assert asked.stdout.read() == "first\nlast\n"
    assert asked.fork.wait(PATIENCE_S) == 0


def test_a_worker_that_runs_is_not_ended_and_one_that_is_killed_is_told(seed: Seed) -> None:
    asked = Asked(seed, "import sys; sys.stdin.readline()")
    with pytest.raises(subprocess.TimeoutExpired):
        asked.fork.wait(0.0)
    asked.fork.kill()
    assert asked.fork.wait(PATIENCE_S) == -signal.SIGKILL
    asked.fork.kill()  # and once more does no harm


def test_a_worker_dies_with_the_process_that_xdist_started_for_it(seed: Seed) -> None:
    with subprocess.Popen(
        [*shlex.split(seed.worker_command), "-u", "-c", "appended by execnet"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdin
        assert started.stdout
        print(
            repr("import os, sys; print(os.getpid(), flush=True); sys.stdin.readline()"), file=started.stdin, flush=True
        )
        pid = int(started.stdout.readline())
        assert pid != started.pid
        started.kill()
        assert until(lambda: not is_running(pid))


def test_workers_die_with_the_seed(seed: Seed) -> None:
    asked = Asked(seed, "import sys; sys.stdin.readline()")
    seed.stop()
    assert until(lambda: not is_running(asked.fork.pid))
    with pytest.raises(SeedError):
        asked.fork.wait(PATIENCE_S)


def test_a_zygote_of_the_seed_forks_engines_and_ends_with_its_parent(seed: Seed, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with SeededZygote(
        seed.path, ["json"], env={"ONE": "1"}, log_path=tmp_path / "zygote.log", scratch=("SCRATCH",)
    ) as zygote:
        ready = zygote.wait_ready(60.0)
        assert ready is not None
        assert ready.num_threads == 1
        engine = zygote.start_engine(
            EngineSpec("e0", "timeit", ("-n", "1", "import os; print(os.environ['ONE'])"), {}, log)
        )
        assert engine.wait(PATIENCE_S) == 0
        assert "[e0] 1\n" in log.read_text()
        lasting = zygote.start_engine(EngineSpec("e1", "timeit", ("-n", "1", "import time; time.sleep(1e6)"), {}, log))
        pid = zygote.pid
    assert not is_running(pid)
    assert not is_running(lasting.pid)


def test_a_seed_that_cannot_start_says_why(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    thread = "threading.Thread(target=time.sleep, args=[1e6], daemon=True)"
    (tmp_path / "threaded.py").write_text(f"import threading, time; {thread}.start()")
    python_path = os.pathsep.join([PYTHON_PATH, str(tmp_path)])
    with pytest.raises(SeedError), Seed(["threaded"], python_path=python_path) as seed:
        Fork(seed.path, WORKER, (0, 1, 2), {})
    assert "left 2 threads" in capfd.readouterr().err
