"""What only the Mooncake transport can get wrong: how it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread, Timer, current_thread
from threading import enumerate as enumerate_threads

import numpy as np
import pytest

from contract.ends import MEMORY_BYTES, Memory, ProcessReceiver
from patience import PATIENCE_S
from pdcluster_connector.transport import mooncake
from pdcluster_connector.transport.base import TransportSettings, WriteId, WriteStatus
from pdcluster_connector.transport.mooncake import MooncakeTransport
from pdcluster_connector.transport.protocol_check import require_taken
from pdcluster_protocol.errors import ConfigError, TransferError

START = (
    "from pdcluster_connector.transport.mooncake import MooncakeTransport as m; "
    "from pdcluster_connector.transport.base import TransportSettings as s; m(s('127.0.0.1', 'tcp'))"
)


def test_the_unacknowledged_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match=r"MC_TCP_PROTO=1 .*: unset it"):
        MooncakeTransport(TransportSettings("127.0.0.1", "tcp"))


@pytest.mark.parametrize(
    ("host", "protocol", "message"),
    [
        ("127.0.0.1", "udp", r"transfer_protocol is 'udp': use one of ascend, rdma, tcp"),
        ("192.0.2.1", "tcp", r"192\.0\.2\.1 is not an address of this machine .*: set host"),
        ("no-such-host.invalid", "tcp", r"no-such-host\.invalid is not an address of this machine"),
    ],
)
def test_what_mooncake_would_take_silently_and_fail_with_later_is_refused(
    host: str, protocol: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MooncakeTransport(TransportSettings(host, protocol))


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an RDMA device")
def test_rdma_without_a_device_is_refused_rather_than_replaced_by_tcp() -> None:
    with pytest.raises(ConfigError, match=r"rdma.*use transfer_protocol tcp"):
        MooncakeTransport(TransportSettings("127.0.0.1", "rdma"))
    assert "MC_FORCE_TCP" not in os.environ, "what an earlier engine of this process needed"


def test_tcp_is_forced_so_that_a_machine_with_rdma_devices_takes_it_too(capfd: pytest.CaptureFixture[str]) -> None:
    MooncakeTransport(TransportSettings("127.0.0.1", "tcp")).close()
    assert os.environ["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP is set, using TCP transport only" in capfd.readouterr().err


def test_a_protocol_that_mooncake_replaces_without_a_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    with pytest.raises(
        ConfigError, match=r"transfer_protocol is ascend, and Mooncake took tcp: install Mooncake's build"
    ):
        MooncakeTransport(TransportSettings("127.0.0.1", "ascend"))


def test_an_engine_says_which_protocol_it_took_and_that_it_acknowledges(caplog: pytest.LogCaptureFixture) -> None:
    transport = MooncakeTransport(TransportSettings("127.0.0.1", "tcp"))
    try:
        host, _, port = transport.session.rpartition(":")
        require_taken("tcp", host, int(port))
        with pytest.raises(ConfigError, match="transfer_protocol is rdma, and Mooncake took tcp: "):
            require_taken("rdma", host, int(port))
    finally:
        transport.close()
    assert not caplog.messages, "it did not say"


def test_another_transport_that_the_user_forces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_FORCE_MNNVL", "1")
    with pytest.raises(ConfigError, match=r"transfer_protocol is tcp, but MC_FORCE_MNNVL=1 .*unset MC_FORCE_MNNVL"):
        MooncakeTransport(TransportSettings("127.0.0.1", "tcp"))


def test_the_thread_that_submits_a_peers_first_writes_enters_the_device_before() -> None:
    """Mooncake's transport of Ascend asks for the device of the thread that submits."""
    entered: list[str] = []
    memory = np.zeros(64, np.uint8)
    settings = TransportSettings("127.0.0.1", "tcp", enter_thread=lambda: entered.append(current_thread().name))
    transport, peer = MooncakeTransport(settings), MooncakeTransport(settings)
    try:
        transport.register(memory.ctypes.data, memory.nbytes)
        write = transport.submit_writes(peer.session, [(memory.ctypes.data, 4096, 64)])
        deadline = time.monotonic() + 60
        while (status := transport.write_status(write)) is WriteStatus.PENDING and time.monotonic() < deadline:
            time.sleep(0.01)
        assert status is not WriteStatus.PENDING
        assert entered == ["pdcluster-open"]
    finally:
        transport.close()
        peer.close()


def test_a_session_names_the_host_and_differs_between_transports() -> None:
    transports = [MooncakeTransport(TransportSettings("127.0.0.1", "tcp")) for _ in range(2)]
    sessions = {transport.session for transport in transports}
    assert len(sessions) == 2
    assert {session.partition(":")[0] for session in sessions} == {"127.0.0.1"}
    for transport in transports:
        transport.close()


def test_a_missing_system_library_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, "-c", START], env=env, capture_output=True, text=True, check=False)
    assert "ConfigError: Mooncake cannot be loaded (libibverbs.so.1" in run.stderr
    assert "apt-get install libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4" in run.stderr


class _StopsBeforeItsFirstWrite(MooncakeTransport):
    """``victim`` stands still between its answer to the probe and the first write to it."""

    victim: ProcessReceiver | None = None

    def _probe(self, session: str) -> bool:
        is_alive = super()._probe(session)
        if self.victim is not None and session == self.victim.session:
            self.victim.pause()
        return is_alive


def test_a_peer_that_stops_while_it_is_opened_holds_up_neither_what_others_ask_nor_the_close() -> None:
    """Mooncake opens it within the first write to it, and stays there for a minute. It takes no other write meanwhile:
    what is submitted to a third peer waits with it."""
    memory, transport = Memory(), _StopsBeforeItsFirstWrite(TransportSettings("127.0.0.1", "tcp"))
    transport.register(memory.address, MEMORY_BYTES)
    with ExitStack() as stack:
        healthy, stopped = ProcessReceiver(stack), ProcessReceiver(stack)
        stack.callback(stopped.resume)
        assert ended(transport, transport.submit_writes(healthy.session, [(memory.address, healthy.address, 16)]))
        asked_late = transport.submit_writes(healthy.session, [(memory.address, healthy.address, 16)])
        transport.victim = stopped
        held = transport.submit_writes(stopped.session, [(memory.address, stopped.address, 16)])
        time.sleep(1)  # Its thread is inside Mooncake now.
        assert within(30, lambda: ended(transport, asked_late))
        assert transport.write_status(held) is WriteStatus.PENDING
        assert within(30, lambda: closed(transport))


class _HasAThreadInside(MooncakeTransport):
    """A thread is inside Mooncake until ``may_leave``, as one that opens a stopped peer is for a minute."""

    def __init__(self) -> None:
        super().__init__(TransportSettings("127.0.0.1", "tcp"))
        self.may_leave, self._is_in = Event(), Event()
        self._thread = Thread(target=self._stay, daemon=True)

    def hold(self) -> None:
        self._thread.start()
        assert self._is_in.wait(PATIENCE_S)

    def let_out(self) -> None:
        self.may_leave.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _stay(self) -> None:
        with self._running():
            self._is_in.set()
            self.may_leave.wait(PATIENCE_S)


def test_a_close_that_is_not_certain_says_so_each_time_and_writes_stay_pending_until_it_is() -> None:
    """Lanes share a transport: one that hears of a write's end, or of a close, lets its blocks be used again."""
    memory, transport = Memory(), _HasAThreadInside()
    transport.register(memory.address, MEMORY_BYTES)
    with ExitStack() as stack:
        peer = ProcessReceiver(stack)
        stack.callback(peer.resume)
        assert ended(transport, transport.submit_writes(peer.session, [(memory.address, peer.address, 16)]))
        peer.pause()
        under_way = transport.submit_writes(peer.session, [(memory.address, peer.address, 1 << 20)])
        transport.hold()
        for _ in range(2):
            with pytest.raises(TransferError, match="cannot be closed: a thread in it still opens a peer"):
                transport.close()
            assert transport.write_status(under_way) is WriteStatus.PENDING
        transport.let_out()
        assert transport.write_status(under_way) is WriteStatus.FAILED
        transport.close()


def test_a_thread_that_comes_out_soon_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a lane may stand still inside Mooncake for a while, and the engine must not end for it."""
    monkeypatch.setattr(mooncake, "_CLOSE_S", 60.0)  # On a busy machine the timer below is late.
    memory, transport = Memory(), _HasAThreadInside()
    transport.register(memory.address, MEMORY_BYTES)
    with ExitStack() as stack:
        peer = ProcessReceiver(stack)
        to_peer = [(memory.address, peer.address, 16)]
        assert ended(transport, transport.submit_writes(peer.session, to_peer))
        transport.submit_writes(peer.session, to_peer)
        transport.hold()
        soon = Timer(0.2, transport.may_leave.set)
        soon.start()
        transport.close()
        soon.join()


def test_a_write_that_was_refused_is_no_reason_not_to_close() -> None:
    memory, transport = Memory(), _HasAThreadInside()
    transport.register(memory.address, MEMORY_BYTES)
    transport.submit_writes("127.0.0.1:1", [(memory.address, 4096, 16)])
    for thread in enumerate_threads():
        if thread.name == "pdcluster-open":
            thread.join(PATIENCE_S)
    transport.hold()
    transport.close()  # Raises where it is not certain.
    transport.let_out()


def closed(transport: MooncakeTransport) -> bool:
    transport.close()
    return not transport.is_open


def ended(transport: MooncakeTransport, write: WriteId) -> bool:
    while (status := transport.write_status(write)) is WriteStatus.PENDING:
        time.sleep(0.01)
    return status is WriteStatus.DONE


def within(seconds: float, call: Callable[[], bool]) -> bool:
    """What ``call`` answers, if it comes back in time: half of Mooncake's minute."""
    answers: list[bool] = []
    thread = Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers == [True]
