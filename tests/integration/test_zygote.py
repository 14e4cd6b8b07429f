"""One import, many processes, and none of them outlives whoever asked for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.harness import eventually
from integration.ports import fresh_port
from integration.processes import PYTHON_PATH, TESTS, descendants, env_with_tests, is_port_free, is_running
from patience import PATIENCE_S
from pdcluster_cli.processes import zygote as zygote_module
from pdcluster_cli.processes.zygote import EngineHandle, EngineSpec, Zygote, ZygoteError


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    with Zygote(["json"], env={"PYTHONPATH": PYTHON_PATH}, log_path=tmp_path / "zygote.log") as started:
        yield started


def _start_stubborn(zygote: Zygote, folder: Path, port: int) -> tuple[EngineHandle, set[int]]:
    argv = (str(port), str(folder / "pids"))
    spec = EngineSpec("stubborn", "integration.stubborn_engine", argv, {}, folder / "stubborn.log")
    engine = zygote.start_engine(spec)
    return engine, _read_pids(folder)


def _read_pids(folder: Path) -> set[int]:
    assert eventually((folder / "pids").exists)
    return {int(pid) for pid in (folder / "pids").read_text().split()}


def _run(zygote: Zygote, folder: Path, code: str, **settings: dict[str, str]) -> tuple[int | None, str]:
    (folder / "one_module.py").write_text(code)
    spec = EngineSpec(
        "one",
        "one_module",
        ("--flag", "value"),
        {"PYTHONPATH": None, **settings.get("env", {})},
        folder / "one.log",
        settings.get("overrides", {}),
    )
    exit_code = zygote.start_engine(spec).wait(PATIENCE_S)
    return exit_code, (folder / "one.log").read_text()


@pytest.fixture
def zygote_here(tmp_path: Path) -> Iterator[Zygote]:
    with Zygote(["json"], env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "zygote.log") as started:
        yield started


def test_an_engine_runs_as_main_with_its_own_arguments_and_environment(zygote_here: Zygote, tmp_path: Path) -> None:
    code = "import os, sys\nprint(__name__, sys.argv, os.environ.get('PYTHONPATH'), os.environ['COLOUR'])"
    exit_code, log = _run(zygote_here, tmp_path, code, env={"COLOUR": "red"})
    assert (exit_code, log) == (
        0,
        "[one] __main__ ['" + str(tmp_path / "one_module.py") + "', '--flag', 'value'] None red\n",
    )


def test_overrides_are_set_before_the_module_runs(zygote_here: Zygote, tmp_path: Path) -> None:
    exit_code, log = _run(zygote_here, tmp_path, "import json\nprint(json.colour)", overrides={"json.colour": "blue"})
    assert (exit_code, log) == (0, "[one] blue\n")


def test_a_crash_gives_its_status_and_its_traceback_in_the_log(zygote_here: Zygote, tmp_path: Path) -> None:
    exit_code, log = _run(zygote_here, tmp_path, "raise RuntimeError('out of\\nmemory')")
    assert exit_code == 1
    assert log.endswith("[one] RuntimeError: out of\n[one] memory\n")


@pytest.mark.parametrize(("code", "status"), [("None", 0), ("0", 0), ("7", 7), ("True", 1), ("'no memory'", 1)])
def test_an_engine_ends_with_its_status_after_its_threads_and_exit_functions(
    zygote_here: Zygote, tmp_path: Path, code: str, status: int
) -> None:
    module = (
        "import atexit, sys, threading, time\natexit.register(print, 'exit function', end='')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        f"sys.exit({code})"
    )
    exit_code, log = _run(zygote_here, tmp_path, module)
    assert exit_code == status
    assert log.replace("[one] no memory\n", "") == "[one] thread\n[one] exit function"


def test_what_an_engine_has_of_its_zygote_is_not_taken_apart_at_its_end(zygote_here: Zygote, tmp_path: Path) -> None:
    """Each page of it would be copied first. An engine's own exit function comes before."""
    module = (
        "import json, os\nclass Told:\n    def __del__(self, write=os.write): write(1, b'taken apart')\n"
        "json.kept = Told()\nprint('end')\n"
    )
    assert _run(zygote_here, tmp_path, module) == (0, "[one] end\n")


def test_the_garbage_collector_is_off_while_the_zygote_imports_and_on_in_an_engine(tmp_path: Path) -> None:
    """Its passes over what is imported only cost time; what an engine leaves behind it must collect."""
    (tmp_path / "slow_module.py").write_text("import gc\nwas_on = gc.isenabled()")
    with Zygote(["slow_module"], env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "zygote.log") as zygote:
        code = "import gc, slow_module\nprint(slow_module.was_on, gc.isenabled(), gc.get_freeze_count() > 0)"
        assert _run(zygote, tmp_path, code) == (0, "[one] False True True\n")


def test_an_engine_is_its_own_process_group_and_single_threaded(zygote_here: Zygote, tmp_path: Path) -> None:
    code = "import os, threading\nprint(os.getpgid(0) == os.getpid(), len(os.listdir('/proc/self/task')))"
    assert _run(zygote_here, tmp_path, code) == (0, "[one] True 1\n")


def test_modules_are_imported_once_and_shared(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import os\nimported_by = os.getpid()")
    with Zygote(["slow_module"], env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "zygote.log") as zygote:
        code = "import os, slow_module\nprint(slow_module.imported_by == os.getppid())"
        assert _run(zygote, tmp_path, code) == (0, "[one] True\n")


def test_stop_kills_what_ignores_sigterm_with_all_its_forks(zygote: Zygote, tmp_path: Path) -> None:
    port = fresh_port()
    engine, pids = _start_stubborn(zygote, tmp_path, port)
    assert not is_port_free(port)
    assert engine.stop(grace_s=0.2) == -signal.SIGKILL
    assert not any(is_running(pid) for pid in pids)
    assert is_port_free(port)


def test_an_engine_that_ends_takes_its_forks_along(zygote: Zygote, tmp_path: Path) -> None:
    engine, pids = _start_stubborn(zygote, tmp_path, fresh_port())
    engine.signal(signal.SIGKILL)
    assert engine.wait(PATIENCE_S) == -signal.SIGKILL
    assert not any(is_running(pid) for pid in pids)


def test_an_engine_that_ends_takes_along_a_program_that_it_started(zygote_here: Zygote, tmp_path: Path) -> None:
    """Unlike a fork, a program is not told when its parent dies: only the end of the process group ends it."""
    code = (
        "import os, signal, subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 120; echo ended by itself'])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert _run(zygote_here, tmp_path, code) == (-signal.SIGKILL, "")


def test_a_folder_for_scratch_goes_with_the_zygote_even_when_its_processes_were_killed(tmp_path: Path) -> None:
    here = {"PYTHONPATH": str(tmp_path)}
    with Zygote(["json"], env=here, log_path=tmp_path / "zygote.log", scratch=("SOCKETS", "LOCKS")) as zygote:
        (tmp_path / "leaver.py").write_text(
            "import os, signal\nfrom pathlib import Path\nassert os.environ['LOCKS'] == os.environ['SOCKETS']\n"
            "Path(os.environ['SOCKETS'], 'left').touch()\nprint(os.environ['SOCKETS'], flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        spec = EngineSpec("leaver", "leaver", (), {}, tmp_path / "leaver.log")
        assert zygote.start_engine(spec).wait(PATIENCE_S) == -signal.SIGKILL
        folder = Path((tmp_path / "leaver.log").read_text().removeprefix("[leaver] ").strip())
        assert (folder / "left").exists()
    assert not folder.exists()


def test_leaving_the_with_ends_all_engines_and_the_zygote(tmp_path: Path) -> None:
    with Zygote(["json"], env={"PYTHONPATH": PYTHON_PATH}, log_path=tmp_path / "zygote.log") as zygote:
        _, pids = _start_stubborn(zygote, tmp_path, fresh_port())
        below = descendants(zygote.pid)
        assert pids <= below
        began = time.monotonic()
        zygote.stop(grace_s=0.2)
    assert not any(is_running(pid) for pid in below | {zygote.pid})
    assert time.monotonic() - began < 60


def test_a_killed_zygote_takes_its_engines_along(zygote: Zygote, tmp_path: Path) -> None:
    engine, pids = _start_stubborn(zygote, tmp_path, fresh_port())
    subprocess.run(["kill", "-KILL", str(zygote.pid)], check=True)
    assert engine.wait(PATIENCE_S) == -signal.SIGKILL
    assert eventually(lambda: not any(is_running(pid) for pid in pids))
    with pytest.raises(ZygoteError, match=r"has ended with signal 9: killed from outside.*zygote\.log"):
        zygote.start_engine(engine.spec)


def test_a_killed_zygote_takes_along_the_programs_that_its_engines_started(zygote_here: Zygote, tmp_path: Path) -> None:
    (tmp_path / "starter.py").write_text(
        "import signal, subprocess\nfrom pathlib import Path\nprogram = subprocess.Popen(['sleep', '120'])\n"
        "Path('pid.new').write_text(str(program.pid))\nPath('pid.new').rename('pid')\nsignal.pause()".replace(
            "'pid", f"'{tmp_path}/pid"
        )
    )
    engine = zygote_here.start_engine(EngineSpec("starter", "starter", (), {}, tmp_path / "starter.log"))
    assert eventually((tmp_path / "pid").exists)
    program = int((tmp_path / "pid").read_text())
    subprocess.run(["kill", "-KILL", str(zygote_here.pid)], check=True)
    assert engine.wait(PATIENCE_S) == -signal.SIGKILL
    assert eventually(lambda: not is_running(program))


def test_a_zygote_that_stands_still_is_not_waited_for_endlessly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_module, "ORDER_WAIT_S", 0.3)
    with Zygote(["json"], env={}, log_path=tmp_path / "zygote.log") as zygote:
        assert zygote.wait_ready(PATIENCE_S) is not None
        subprocess.run(["kill", "-STOP", str(zygote.pid)], check=True)
        try:
            with pytest.raises(ZygoteError, match=r"starts nothing for 0 s: see .*zygote\.log"):
                zygote.start_engine(EngineSpec("one", "one_module", (), {}, tmp_path / "one.log"))
        finally:
            subprocess.run(["kill", "-CONT", str(zygote.pid)], check=True)


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    port = fresh_port()
    script = str(TESTS / "integration" / "zygote_parent.py")
    parent = subprocess.Popen([sys.executable, script, str(tmp_path), str(port)], env=env_with_tests())
    pids = _read_pids(tmp_path) | descendants(parent.pid)
    assert len(pids) == 3
    parent.kill()
    parent.wait()
    assert eventually(lambda: not any(is_running(pid) for pid in pids))
    assert is_port_free(port)


def test_a_module_that_this_version_of_a_library_lacks_is_left_to_its_engines(tmp_path: Path) -> None:
    modules = ["json.no_such_part", "json.no_such_part.deeper", "json.decoder"]
    with Zygote(modules, env={}, log_path=tmp_path / "zygote.log") as zygote:
        ready = zygote.wait_ready(PATIENCE_S)
    assert ready is not None


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("msgspec", "json", "planted"):
        (here / f"{name}.py").write_text("raise RuntimeError('run from the current folder')")
    monkeypatch.chdir(here)
    with Zygote(["json"], env={}, log_path=tmp_path / "zygote.log") as zygote:
        assert zygote.wait_ready(PATIENCE_S) is not None
        spec = EngineSpec("one", "planted", (), {}, tmp_path / "one.log")
        assert zygote.start_engine(spec).wait(PATIENCE_S) == 1
    assert "No module named planted" in (tmp_path / "one.log").read_text()


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    log = tmp_path / "zygote.log"
    with Zygote(["no_such_module"], env={}, log_path=log) as zygote, pytest.raises(ZygoteError) as raised:
        zygote.wait_ready(PATIENCE_S)
    first, *last = str(raised.value).splitlines()
    why = "ModuleNotFoundError: No module named 'no_such_module'"
    assert first == f"the process that imports and forks has ended with status 1: {why}; the end of {log}:"
    assert last[-1].strip() == why


def test_a_module_that_leaves_a_thread_behind_is_refused(tmp_path: Path) -> None:
    threaded = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(threaded)
    zygote = Zygote(["threaded"], env={"PYTHONPATH": str(tmp_path)}, log_path=tmp_path / "zygote.log")
    with zygote, pytest.raises(ZygoteError, match="left 2 threads"):
        zygote.wait_ready(20)
