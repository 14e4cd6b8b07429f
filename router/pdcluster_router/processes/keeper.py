"""Starts the processes of a router, and keeps their number: ``--processes``.

    SIGTERM, SIGINT    all drain, and end; a second one ends their waits
    SIGHUP             each reads its files anew
    SIGUSR2            each is replaced, one after another, and no connection is refused meanwhile

The keeper holds the listening sockets of all places, so connections that wait there survive a process that ends. It
answers no request itself. ``core/processes/succession.py`` decides; this file carries it out.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.core.processes.succession import (
    SEATS_PER_PLACE,
    EndRouter,
    HurryProcess,
    KillProcess,
    LetLeave,
    ProcessCommand,
    RenewalEnded,
    StartProcess,
    StopProcess,
    Succession,
)
from pdcluster_router.processes.seat import SEAT_VARIABLE, Seat
from pdcluster_router.processes.shared_loads import SharedLoads, make_table
from pdcluster_router.processes.siblings import add_up_ended

logger = logging.getLogger(__name__)

SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2})
"""Those that a keeper hears. Block them before ``serve``, which lets them in once it can hear them."""
_SIGNAL_OF: Final[dict[type[ProcessCommand], signal.Signals]] = {
    LetLeave: signal.SIGUSR1,
    StopProcess: signal.SIGTERM,
    HurryProcess: signal.SIGINT,
    KillProcess: signal.SIGKILL,
}
LOOK_S: Final = 1.0
"""Seconds between two looks at the processes, and between two words of each."""
_MAX_PATH_BYTES: Final = 90
"""The most bytes of the folder's path: that of a Unix socket in it may have 107."""


@dataclass(frozen=True, slots=True)
class ListeningSockets:
    """The listening sockets of a router's places. The kernel deals new connections out among them."""

    host: str
    """As the settings name it."""
    clients: Sequence[socket.socket]
    internals: Sequence[socket.socket]
    new_calls: Callable[[], socket.socket]
    """Makes the listening socket at which engines call one process."""

    @property
    def ports(self) -> tuple[int, int]:
        """The clients' port, and the internal one."""
        return self.clients[0].getsockname()[1], self.internals[0].getsockname()[1]

    def close(self) -> None:
        for sock in (*self.clients, *self.internals):
            sock.close()


@dataclass(slots=True)
class _OneProcess:
    """One process that has not ended."""

    process: Process
    life: int
    words: int
    """Our end of the pipe on which it says that it answers, and each second that it goes on."""
    is_ready: bool = False
    has_missed_reload: bool = False
    """Whether it is to read its files anew once it is ready."""
    end: asyncio.Task[None] | None = None
    """Waits for its end."""


class Keeper:
    """Owns the processes, the places and the folder. One event loop; ``run`` may be called once."""

    def __init__(
        self,
        sockets: ListeningSockets,
        command: Sequence[str],
        read_drain_s: Callable[[], float],
        *,
        reads_files: bool,
        look_s: float = LOOK_S,
    ) -> None:
        """``command``: starts a process of the router. ``read_drain_s``: reads how long running requests have after
        SIGTERM; called whenever a process may read it. ``reads_files``: whether SIGHUP makes processes read files
        anew; otherwise it ends the router.

        Raises:
            ConfigError: No folder can be made for the processes.
        """
        self._sockets = sockets
        self._command = command
        self._read_drain_s = read_drain_s
        self._drain_s = read_drain_s()
        """The longest that any process may have read."""
        self._reads_files = reads_files
        self._look_s = look_s
        self._succession = Succession(len(sockets.clients))
        self.num_seats = SEATS_PER_PLACE * len(sockets.clients)
        self._running: dict[int, _OneProcess] = {}
        self._num_lives = 0
        self._status: int | None = None
        self._events: list[Callable[[float], Sequence[ProcessCommand]]] = []
        """All that has happened and was not told yet."""
        self._is_due_to_look = False
        self._changed = asyncio.Event()
        self._life_line = os.pipe()
        """A pipe to which we write nothing: processes see its end when this one has ended, however."""
        self._folder, self._folder_file = _make_folder()
        self.loads_file = make_table(self.num_seats)
        """The shared loads."""
        self._loads = SharedLoads(self.loads_file, self.num_seats, 0)

    async def run(self) -> int:
        """Serves until all processes have ended. Returns the router's exit status. Hears no signals: see ``serve``."""
        loop = asyncio.get_running_loop()
        looking = loop.create_task(self._look(), name="keeper: looks")
        try:
            await self._carry_out(self._succession.begin(now=loop.time()))
            while self._status is None:
                await self._wait(loop.time())
                await self._go_on(loop.time())
        finally:
            looking.cancel()
            await self._close()
        return self._status

    async def _look(self) -> None:
        """Looks at the processes for as long as there are some."""
        while True:
            await asyncio.sleep(self._look_s)
            self._is_due_to_look = True
            self._changed.set()

    async def _wait(self, now: float) -> None:
        """Until something has happened, or is due."""
        due = self._succession.next_at()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                await self._changed.wait()
        self._changed.clear()

    async def _go_on(self, now: float) -> None:
        if self._is_due_to_look:  # Once, however long the last commands took.
            self._is_due_to_look = False
            await self._carry_out(self._succession.look())
        events, self._events = self._events, []
        for tell in events:
            await self._carry_out(tell(now))
        await self._carry_out(self._succession.tick(now=now))

    def _happened(self, tell: Callable[[float], Sequence[ProcessCommand]]) -> None:
        """``tell``: tells the succession, with the time, and returns its commands."""
        self._events.append(tell)
        self._changed.set()

    # What signals ask for.

    def stop(self) -> None:
        """All processes drain and end; a second time, none waits any longer."""
        self._happened(lambda now: self._succession.stop(now=now, drain_s=self._drain_s))

    def renew(self) -> None:
        """Each process that runs is replaced."""
        logger.info("processes are to be replaced")
        self._happened(lambda now: self._succession.renew(now=now))

    def reload(self) -> None:
        """Each process reads its files anew; where there are none, all end. Those that start may have read them before
        they changed: they are told when they are ready, for at first the signal would end them."""
        if not self._reads_files:
            self.stop()
            return
        self._drain_s = max(self._drain_s, self._read_drain_s())
        for seat, running in self._running.items():
            if running.is_ready:
                self._signal(seat, signal.SIGHUP)
            running.has_missed_reload = not running.is_ready

    # Commands.

    async def _carry_out(self, commands: Sequence[ProcessCommand]) -> None:
        for command in commands:
            match command:
                case StartProcess(place, seat):
                    await self._start(place, seat)
                case LetLeave() | StopProcess() | HurryProcess() | KillProcess():
                    self._tell(command)
                case RenewalEnded(num_old):
                    _log_renewal(num_old)
                case EndRouter(status):
                    self._status = status

    def _tell(self, command: LetLeave | StopProcess | HurryProcess | KillProcess) -> None:
        if isinstance(command, KillProcess):
            logger.warning("process is killed: it is silent, or has not ended in time seat=%d", command.seat)
        self._signal(command.seat, _SIGNAL_OF[type(command)])

    def _signal(self, seat: int, number: signal.Signals) -> None:
        running = self._running.get(seat)
        if running is not None and running.process.returncode is None:
            running.process.send_signal(number)

    async def _start(self, place: int, seat: int) -> None:
        self._num_lives += 1
        self._drain_s = max(self._drain_s, self._read_drain_s())
        words, its_words = os.pipe()
        os.set_blocking(words, False)
        try:
            process = await self._spawn(place, seat, its_words)
        except (OSError, ConfigError) as error:  # No port, no memory, or no process more.
            os.close(words)
            logger.error("process not started place=%d reason=%s", place, error)
            self._happened(lambda now: self._succession.ended(seat, 1, now=now, drain_s=self._drain_s))
            return
        finally:
            os.close(its_words)
        self._running[seat] = running = _OneProcess(process, self._num_lives, words)
        loop = asyncio.get_running_loop()
        loop.add_reader(words, self._heard, seat, running)
        running.end = loop.create_task(self._await_end(seat, running), name=f"keeper: life {running.life}")
        logger.info("process started place=%d seat=%d pid=%d", place, seat, process.pid)

    async def _spawn(self, place: int, seat: int, words: int) -> Process:
        with self._sockets.new_calls() as calls:
            given = self._seat(place, seat, calls, words)
            return await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, SEAT_VARIABLE: given.encoded()},
                pass_fds=given.files,
                start_new_session=True,  # Ctrl-C is for the keeper, which tells them once.
            )

    def _seat(self, place: int, number: int, calls: socket.socket, words: int) -> Seat:
        port, internal_port = self._sockets.ports
        return Seat(
            number=number,
            life=self._num_lives,
            num_seats=self.num_seats,
            folder=self._folder,
            client_file=self._sockets.clients[place].fileno(),
            internal_file=self._sockets.internals[place].fileno(),
            calls_file=calls.fileno(),
            host=self._sockets.host,
            port=port,
            internal_port=internal_port,
            calls_port=calls.getsockname()[1],
            loads_file=self.loads_file,
            word_file=words,
            keeper_file=self._life_line[0],
        )

    # What becomes of a process.

    def _heard(self, seat: int, running: _OneProcess) -> None:
        """The process has said that it answers, or that it goes on, or it has ended."""
        words = _read_all(running.words)
        if words is None:
            return
        if not words:
            asyncio.get_running_loop().remove_reader(running.words)
        elif running.is_ready:
            self._succession.heard(seat)
        else:
            logger.info("process ready seat=%d", seat)
            running.is_ready = True
            if running.has_missed_reload:
                self._signal(seat, signal.SIGHUP)
            self._happened(lambda now: self._succession.ready(seat, now=now))

    async def _await_end(self, seat: int, running: _OneProcess) -> None:
        status = await running.process.wait()
        asyncio.get_running_loop().remove_reader(running.words)
        os.close(running.words)
        del self._running[seat]
        try:
            self._clear_up(seat, running.life)
        except (OSError, ValueError) as error:  # A full disk, or a file that is none of ours.
            logger.warning("files of a process are left over seat=%d reason=%r", seat, error)
        is_expected = status == 0 or self._succession.is_ending
        logger.log(logging.INFO if is_expected else logging.ERROR, "process ended seat=%d status=%d", seat, status)
        self._happened(lambda now: self._succession.ended(seat, abs(status), now=now, drain_s=self._drain_s))

    def _clear_up(self, seat: int, life: int) -> None:
        self._loads.forget(seat)
        (self._folder / f"{life}.sock").unlink(missing_ok=True)
        add_up_ended(self._folder, {one.life for one in self._running.values()})

    async def _close(self) -> None:
        """No process, no socket and no file is left."""
        for seat in list(self._running):
            self._signal(seat, signal.SIGKILL)
        await asyncio.gather(*(one.end for one in self._running.values() if one.end is not None))
        self._sockets.close()
        self._loads.close()
        for file in (*self._life_line, self._folder_file):
            os.close(file)
        shutil.rmtree(self._folder, ignore_errors=True)


async def serve(keeper: Keeper) -> int:
    """As ``Keeper.run``, with the signals of this process. Main thread only."""
    loop = asyncio.get_running_loop()
    if sys.version_info < (3, 12):  # Its own way needs a thread for each process.
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(loop)
        asyncio.set_child_watcher(watcher)
    handlers = {
        signal.SIGTERM: keeper.stop,
        signal.SIGINT: keeper.stop,
        signal.SIGHUP: keeper.reload,
        signal.SIGUSR2: keeper.renew,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        return await keeper.run()
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _make_folder() -> tuple[Path, int]:
    """A new folder that only this user can read, and the open file that locks it. systemd leaves locked ones alone."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="pdcluster-router-"))
    except OSError as error:
        told = f"--processes: no folder can be made for sockets ({error})"
        raise ConfigError(f"{told}: set TMPDIR to one that can be written") from error
    if len(os.fsencode(folder)) > _MAX_PATH_BYTES:
        folder.rmdir()
        raise ConfigError(f"--processes: {folder} is too long for its sockets: set TMPDIR to a shorter path")
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # Some network file systems have no locks, and no systemd that clears them up.
        fcntl.flock(file, fcntl.LOCK_SH)
    return folder, file


def _read_all(file: int) -> bytes | None:
    """All bytes that have come, up to 4 KiB. Empty: no more will come. None: nothing has come yet."""
    try:
        return os.read(file, 4096)
    except BlockingIOError:
        return None


def _log_renewal(num_old: int) -> None:
    if num_old:
        logger.error("processes are not replaced: a new one has failed left=%d", num_old)
    else:
        logger.info("processes are replaced")
