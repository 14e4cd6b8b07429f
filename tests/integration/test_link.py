"""The slow link of the benchmarks: real namespaces, real rates, nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path as File

import pytest
from benchmarks.link import PREFIX, End, Link, LinkError, open_link, remove_leftovers
from benchmarks.places import StreamPath, measure_bandwidth, send_evenly

can_make_links = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
needs_links = pytest.mark.skipif(not can_make_links, reason="needs root and iproute2")

KILLED_RUN = """
import os, signal, subprocess
from benchmarks.link import End, open_link
with open_link("1gbit") as link:
    with link.inside(End.A):
        sleeper = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(sleeper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def path_over(link: Link) -> StreamPath:
    return StreamPath(End.B.value, lambda: link.inside(End.A), lambda: link.inside(End.B))


def require_rate(link: Link, bits_per_s: float, num_bytes: int) -> None:
    """No stream is faster, and the best is as fast: what holds one up may be the machine."""
    shares: list[float] = []
    while len(shares) < 5 and max(shares, default=0) < 0.75:
        shares.append(measure_bandwidth(path_over(link), num_bytes) * 8 / bits_per_s)
        assert shares[-1] <= 1.25
    assert max(shares) >= 0.75


def namespaces_of(pid: int) -> list[File]:
    return list(File("/run/netns").glob(f"{PREFIX}-{pid}-*"))


@needs_links
def test_a_stream_over_the_link_has_the_rate_that_was_asked_for() -> None:
    with open_link("200mbit") as link:
        require_rate(link, 200e6, 10 << 20)
        link.set_rate("800mbit")
        require_rate(link, 800e6, 40 << 20)


def test_a_stream_is_spread_over_the_time_that_was_asked_for() -> None:
    path = StreamPath("127.0.0.1", nullcontext, nullcontext)
    begun = time.monotonic()
    send_evenly(path, 10 << 20, 0.5)
    assert time.monotonic() - begun >= 0.45  # nine of ten pieces have to wait


@needs_links
def test_a_thread_is_back_home_afterwards_and_its_sockets_stay() -> None:
    namespace = File("/proc/thread-self/ns/net")
    home = namespace.readlink()
    with open_link("1gbit") as link:
        with link.inside(End.B):
            assert namespace.readlink() != home
            listener = socket.create_server((End.B.value, 0))
        assert namespace.readlink() == home
        with listener, link.inside(End.A), socket.create_connection(listener.getsockname(), 5) as stream:
            assert stream.getpeername()[0] == End.B.value


@needs_links
def test_a_process_that_is_started_there_sees_the_ends_devices_and_we_see_ours_again() -> None:
    ours, folder = sorted(File("/sys/class/net").iterdir()), File.cwd()
    with open_link("1gbit") as link:
        with link.starting(End.B):
            theirs = subprocess.run(["ls", "/sys/class/net"], capture_output=True, text=True, check=True).stdout.split()
        assert End.B.device in theirs
        assert End.A.device not in theirs
        assert sorted(File("/sys/class/net").iterdir()) == ours
        assert File.cwd() == folder


@needs_links
def test_commands_run_at_their_end() -> None:
    with open_link("1gbit") as link:
        shown = subprocess.run(link.command(End.B, ["ip", "address"]), capture_output=True, text=True, check=True)
        assert End.B.value in shown.stdout
        assert End.A.value not in shown.stdout


@needs_links
def test_nothing_is_left_of_a_link() -> None:
    with open_link("1gbit"):
        pass
    assert namespaces_of(os.getpid()) == []


@needs_links
def test_what_a_killed_run_left_behind_is_removed_with_its_processes() -> None:
    run = subprocess.run([sys.executable, "-c", KILLED_RUN], capture_output=True, text=True, check=False)
    sleeper = int(run.stdout)
    assert File(f"/proc/{sleeper}").exists()
    assert len(remove_leftovers()) >= 2
    with suppress(FileNotFoundError):  # gone, or killed and waiting for init to collect it
        assert "Z" in File(f"/proc/{sleeper}/stat").read_text().rpartition(")")[2].split()[0]


def test_without_iproute2_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LinkError, match="apt-get install iproute2"), open_link("1gbit"):
        pass


@needs_links
def test_a_rate_that_tc_does_not_know_is_named_and_leaves_nothing() -> None:
    with pytest.raises(LinkError, match="slowly"), open_link("slowly"):
        pass
    assert namespaces_of(os.getpid()) == []
