"""The box that ``make e2e`` runs a node in. Needs root, as the node does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from e2e import groups
from e2e.box import FOLDER_VARIABLE, run_in_box

from patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from e2e.box import run_in_box
sys.exit(run_in_box(Path({runs!r}), ["sh", "-c", {script!r}]))
"""

AS_NOBODY = "os.setuid(65534)"
NOBODY = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from e2e.box import BoxError, run_in_box
os.setuid(65534)
try:
    run_in_box(Path({runs!r}), ["true"])
except BoxError as error:
    print(error)
"""


def eventually(holds: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def runs_of(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "runs").glob(f"{groups.PREFIX}*")]


def run(tmp_path: Path, script: str) -> int:
    return run_in_box(tmp_path / "runs", ["sh", "-c", script])


def ours(name: str) -> list[Path]:
    """cgroups called ``name`` right below our own."""
    places = groups.own_groups(Path("/proc/self/cgroup").read_text()).values()
    return [place / name for place in places if (place / name).exists()]


def mounts() -> list[str]:
    """All but those of named networks: tests of the slow link, which may run beside these, come and go with some."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if not line.split()[1].startswith("/run/netns")]


def start_outside(tmp_path: Path, script: str) -> subprocess.Popen[bytes]:
    """The box in a process of its own, that a test may kill."""
    paths = {"root": str(ROOT), "tests": str(ROOT / "tests"), "runs": str(tmp_path / "runs"), "script": script}
    return subprocess.Popen([sys.executable, "-c", OUTSIDE.format(**paths)])


def test_the_status_is_the_commands_own(tmp_path: Path) -> None:
    assert run(tmp_path, "exit 7") == 7


def test_a_box_has_a_network_processes_and_cgroups_of_its_own(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = (
        f"ls /sys/class/net /proc/sys/net/ipv4/conf; ip -o link; ls -d /proc/[0-9]*; cat /proc/self/cgroup >> {told}"
    )
    assert (
        run(tmp_path, f"({script}) > /dev/null; ip -o link | wc -l >> {told}; ls -d /proc/[0-9]* | wc -l >> {told}")
        == 0
    )
    *lines, num_links, num_processes = told.read_text().splitlines()
    assert all(line.endswith(":/") for line in lines), "each cgroup is the root of its hierarchy"
    assert num_links == "1", "loopback alone"
    assert int(num_processes) < 8


def test_a_box_sees_no_hierarchy_in_which_it_has_no_cgroup_of_its_own(tmp_path: Path) -> None:
    """Version 2 beside version 1: what runc makes there is left over, for nobody knows whose it is."""
    told = tmp_path / "told"
    assert run(tmp_path, f"cat /proc/self/mounts > {told}") == 0
    kinds = {place: kind for _, place, kind, *_ in (line.split() for line in told.read_text().splitlines())}
    ours = {kind for place, kind in kinds.items() if place.startswith("/sys/fs/cgroup/")}
    assert ours == {"cgroup"}


def test_nothing_that_a_box_writes_or_leaves_running_is_there_afterwards(tmp_path: Path) -> None:
    marks = [Path(folder) / f"e2e-box-{os.getpid()}" for folder in ("/run", "/var/lib")]
    before = mounts()
    leave = "; ".join(f"touch {mark}" for mark in marks)
    script = f"mkdir /sys/fs/cgroup/memory/deep; {leave}; touch ${FOLDER_VARIABLE}/there; (setsid sleep 7117 &)"
    assert run(tmp_path, script) == 0
    assert not [mark for mark in marks if mark.exists()]
    assert [one for one in mounts() if one not in before] == []
    assert not runs_of(tmp_path)
    assert b"sleep\x007117" not in b"".join(commands())


def test_the_kubelets_kernel_settings_are_seen_inside_only(tmp_path: Path) -> None:
    setting = Path("/proc/sys/vm/overcommit_memory")
    before = setting.read_text()
    assert run(tmp_path, f"grep -qx 1 {setting} && echo 1 > {setting}") == 0
    assert setting.read_text() == before


def test_a_killed_run_takes_everything_with_it_and_the_next_one_sweeps(tmp_path: Path) -> None:
    process = start_outside(tmp_path, "(setsid sleep 7227 &); sleep 7228")
    eventually(lambda: b"sleep\x007228" in b"".join(commands()))
    (name,) = runs_of(tmp_path)
    assert ours(name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: b"sleep\x00722" not in b"".join(commands()))
    assert run(tmp_path, "true") == 0
    assert not runs_of(tmp_path)
    assert not ours(name)


def test_a_run_that_is_told_to_end_leaves_nothing_for_the_next_one(tmp_path: Path) -> None:
    process = start_outside(tmp_path, "(setsid sleep 7557 &); sleep 7558")
    eventually(lambda: b"sleep\x007558" in b"".join(commands()))
    (name,) = runs_of(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not runs_of(tmp_path)
    assert not ours(name)
    assert b"sleep\x00755" not in b"".join(commands())


def test_whoever_is_not_root_is_told_in_one_line_what_helps(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", NOBODY.format(root=str(ROOT), tests=str(ROOT / "tests"), runs=str(tmp_path))],
        capture_output=True,
        text=True,
    )
    assert told.stdout == "a node of our own needs root: sudo make e2e; or give a cluster: KUBECONFIG=... make e2e\n"


def test_a_machine_that_lets_nobody_make_namespaces_is_told_of_in_one_line(tmp_path: Path) -> None:
    """As in a container without privileges: root, without the right to it."""
    program = NOBODY.format(root=str(ROOT), tests=str(ROOT / "tests"), runs=str(tmp_path)).replace(AS_NOBODY, "")
    told = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", program],
        capture_output=True,
        text=True,
    )
    assert told.stdout.startswith("no namespaces here (unshare: unshare failed: Operation not permitted)")
    assert told.stdout.endswith("KUBECONFIG=... make e2e\n")


def test_a_run_that_lives_is_left_alone_by_the_next_one(tmp_path: Path) -> None:
    process = start_outside(tmp_path, "sleep 7337")
    try:
        eventually(lambda: b"sleep\x007337" in b"".join(commands()))
        (name,) = runs_of(tmp_path)
        assert run(tmp_path, "true") == 0
        assert runs_of(tmp_path) == [name]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def commands() -> list[bytes]:
    """Command lines of all processes."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_bytes())
        except OSError:  # It has just ended.
            continue
    return found
