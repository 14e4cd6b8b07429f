"""Mooncake Transfer Engine (0.3.13) by submit and poll.

Source of truth: ``mooncake.engine.TransferEngine`` of ``mooncake-transfer-engine-non-cuda`` 0.3.13, measured:

    transfer_submit_write, batch_transfer_async_write   a batch id; 0 when the peer cannot be opened
    transfer_check_status   0 pending, 1 done, negative failed; frees the batch when not 0: asking again is a crash
    send_probe              0 when the peer answers; waits up to 60 s for a stopped one, without any lock
    destructor              0.8 to 1.0 s, and it holds Python's GIL all the time
    freeEngine (C++)        the same without the GIL, by way of ctypes; the destructor then takes no time
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from pdcluster_connector.transport.base import RegisteredMemory, TransportSettings, WriteId, WriteRange, WriteStatus
from pdcluster_connector.transport.in_use import InUse
from pdcluster_connector.transport.opening import Backend, Openings, Write
from pdcluster_connector.transport.protocol_check import require_taken
from pdcluster_connector.transport.protocols import environment_of, locked_memory_problem, require_rdma_devices
from pdcluster_connector.transport.submits import KnownEnd, Submits, Submitted, choose_submits
from pdcluster_protocol.errors import ConfigError, TransferError
from pdcluster_protocol.launch import MOONCAKE_PORTS, TransferProtocol

_LOG: Final = logging.getLogger("vllm.pdcluster.transport")
_DEFAULTS: Final = {
    # Mooncake's default of 2,048 is for all threads together. Past it Mooncake refuses, and leaves the peer in doubt.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    # Mooncake's default ports are 15000 to 17000. Cut sessions soon use them up: ``_used_ports`` are not used again
    # soon. Ours end below Kubernetes' node ports. Mooncake refuses Linux's ephemeral ports.
    "MC_MIN_RPC_PORT": str(MOONCAKE_PORTS[0]),
    "MC_MAX_RPC_PORT": str(MOONCAKE_PORTS[1]),
}
"""Environment of Mooncake where the user has set none."""
_SYSTEM_LIBRARIES: Final = "apt-get install libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4"
_CLOSE_S: Final = 0.5
"""How long ``close`` waits for probes. A live peer answers in 0.2 ms. This wait and the destructor stay under the
contract's 2 s."""
_LEAVE_S: Final = 0.1
"""How long at least ``close`` waits, after the probes, for the other threads inside. They come out at once."""
_CLOSED: Final = "the transport session is closed"

_INTERNET: Final = (socket.AF_INET, socket.AF_INET6)
_MAX_STARTS: Final = 50
_MAX_USED_PORTS: Final = 1000
_starting_lock: Final = threading.Lock()

_forced: Final[set[str]] = set()
"""Variables that we, not the user, have set for this process's protocol. Guarded by ``_starting_lock``."""

_FREE_ENGINE: Final = "_ZN8mooncake14TransferEngine10freeEngineEv"

E = TypeVar("E")

_DEFERRED: Final = KnownEnd(WriteStatus.PENDING)
_REFUSED: Final = KnownEnd(WriteStatus.FAILED)
_KNOWN: Final[tuple[Submitted, ...]] = (_DEFERRED, _REFUSED)
"""The states of submits that were not handed to Mooncake."""


class MooncakeTransport:
    """One TransferEngine. Lane threads may call ``submit_writes`` and ``write_status`` at the same time."""

    def __init__(self, settings: TransportSettings) -> None:
        """Listen at a free port. Waits for Mooncake's own start (tens of milliseconds).

        Raises:
            ConfigError: Mooncake is missing, set up without acknowledgements, or refuses to start.
        """
        self._memory = RegisteredMemory()
        self._protocol = settings.protocol
        self._enter_thread = settings.enter_thread
        engine = start_on_new_ports(lambda: _start_engine(settings), free_engine, listening_ports)
        self._engine: InUse[Any] = InUse(engine, free_engine)
        self._session = f"{settings.host}:{engine.get_rpc_port()}"
        self._write_ids = itertools.count(1)
        self._submits = _submits_of(settings, engine)
        self._submitted: dict[WriteId, Submitted] = {}
        self._openings = Openings(Backend(self._probe, self._deliver, self._refuse))

    @property
    def session(self) -> str:
        return self._session

    @property
    def is_open(self) -> bool:
        return self._engine.is_open

    @property
    def writes_per_submit(self) -> int:
        return self._submits.writes_per_submit

    def register(self, address: int, num_bytes: int) -> None:
        if self._protocol == TransferProtocol.RDMA and (problem := locked_memory_problem(num_bytes)):
            _LOG.warning("memory not allowed to be locked reason=%s", problem)
        with self._running() as engine:
            status = engine.register_memory(address, num_bytes)
        if status != 0:
            raise ConfigError(
                f"Mooncake cannot register {num_bytes} bytes of KV cache (status {status}): "
                "is the locked-memory limit (ulimit -l) large enough, and the protocol right for this device?"
            )
        self._memory.add(address, num_bytes)

    def submit_writes(self, session: str, ranges: Sequence[WriteRange]) -> WriteId:
        if not self.is_open:
            raise TransferError(_CLOSED)
        self._memory.require_all(ranges)
        write = WriteId(next(self._write_ids))
        if self._openings.is_open(session):
            self._submitted[write] = self._submit(session, ranges)
        else:
            self._submitted[write] = _DEFERRED
            try:
                self._openings.defer(Write(write, session, ranges))
            except TransferError:
                del self._submitted[write]
                raise
        return write

    def write_status(self, write: WriteId) -> WriteStatus:
        submitted = self._submitted[write]
        with self._engine.enter() as engine:
            status = self._end_of(submitted) if engine is None else submitted.status()
        if status is not WriteStatus.PENDING:
            del self._submitted[write]
        return status

    def close(self) -> None:
        """As ``Transport.close``.

        Raises:
            TransferError: A thread that opens a peer is still inside Mooncake, and writes to others may be under way.
        """
        until = time.monotonic() + _CLOSE_S
        self._engine.shut()
        self._openings.close(_CLOSE_S)
        if not self._engine.close(max(_LEAVE_S, until - time.monotonic())) and self._may_write():
            raise TransferError(f"session {self._session} cannot be closed: a thread in it still opens a peer")
        # A thread that is still inside has submitted no write. It frees the engine when it comes out.

    def _may_write(self) -> bool:
        """Whether Mooncake has writes whose end was not seen. Lanes may add and remove writes meanwhile."""
        return any(submitted not in _KNOWN for submitted in list(self._submitted.values()))

    def _end_of(self, submitted: Submitted) -> WriteStatus:
        """The status of a write of a closed engine. The write may be under way until the engine is freed."""
        if submitted in _KNOWN:
            return submitted.status()
        return WriteStatus.FAILED if self._engine.is_freed else WriteStatus.PENDING

    @contextmanager
    def _running(self) -> Iterator[Any]:
        with self._engine.enter() as engine:
            if engine is None:
                raise TransferError(_CLOSED)
            yield engine

    def _submit(self, session: str, ranges: Sequence[WriteRange]) -> Submitted:
        with self._running():
            return self._submits.submit(session, ranges)

    # ``Openings`` calls the next three: the first in a probing thread, the others also in a lane's or a closing thread.

    def _probe(self, session: str) -> bool:
        self._enter_thread()  # This thread submits the first writes, and Mooncake then asks which device it uses.
        with self._engine.enter() as engine:
            is_alive = engine is not None and engine.send_probe(session) == 0
        if not is_alive:
            _LOG.warning("transport peer silent")
        return is_alive

    def _deliver(self, write: Write) -> None:
        submitted: Submitted = _REFUSED
        with suppress(TransferError):
            submitted = self._submit(write.session, write.ranges)
        self._submitted[write.id] = submitted

    def _refuse(self, write: Write) -> None:
        self._submitted[write.id] = _REFUSED


_used_ports: Final[deque[int]] = deque(maxlen=_MAX_USED_PORTS)
"""Ports of the last engines of this process, closed ones too: a writer that was cut off may connect there again."""


def start_on_new_ports(start: Callable[[], E], free: Callable[[E], None], read_ports: Callable[[], set[int]]) -> E:
    """Starts an engine on ports that none of this process's last engines had. ``free`` ends engines on used ports.
    ``read_ports``: returns those on which this process listens, or raises OSError.

    Mooncake draws ports at random from some thousands, and peers that were cut off connect again by themselves to write
    what they still hold (seen with 0.3.13).

    Raises:
        ConfigError: Every start was on used ports, or the ports of one cannot be read.
    """
    with _starting_lock:
        for _ in range(_MAX_STARTS):
            before = read_ports()
            engine = start()
            try:
                ports = read_ports() - before
            except OSError as error:  # No descriptor is left.
                free(engine)
                raise ConfigError(f"the ports of a new session cannot be read: {error}") from error
            if ports.isdisjoint(_used_ports):
                _used_ports.extend(ports)
                return engine
            free(engine)
    raise ConfigError(
        f"in {_MAX_STARTS} starts Mooncake drew only ports that this process had used before: widen the range from "
        "MC_MIN_RPC_PORT to MC_MAX_RPC_PORT, or restart this engine"
    )


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens now. Other threads may open and close files meanwhile."""
    ports = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the file was closed meanwhile, or its number is another file's by now
            ports |= _listening_port(int(entry.name))
    return ports


def _listening_port(number: int) -> set[int]:
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        return set()
    own = os.dup(number)
    try:
        probe = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with probe:
        is_listening = probe.family in _INTERNET and probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return {probe.getsockname()[1]} if is_listening else set()


def free_engine(engine: Any) -> None:
    """End every write into and out of ``engine``; nothing may call it afterwards. Waits 0.8 s, without the GIL."""
    from mooncake import engine as binding  # loaded already: ``engine`` is one of its objects

    free = freeing_of(binding.__file__)
    free.argtypes, free.restype = [ctypes.c_void_p], ctypes.c_int
    free(engine.get_engine_ptr())


def freeing_of(library: str) -> Any:
    """Mooncake's own function that ends an engine, from the binding's file or a library that this needs (the NPU's
    wheel). Nothing else ends writes for sure: the destructor runs when the last reference has gone.

    Raises:
        ConfigError: This build of Mooncake has none.
    """
    try:
        return getattr(ctypes.CDLL(library), _FREE_ENGINE)
    except (AttributeError, OSError) as error:
        raise ConfigError(
            f"Mooncake's build in {library} cannot end its writes ({error}): install mooncake-transfer-engine "
            "0.3.12.post1 or later for this device"
        ) from error


def _start_engine(settings: TransportSettings) -> Any:
    _set_environment(settings.protocol)
    _require_own_address(settings.host)
    if settings.protocol == TransferProtocol.RDMA:
        require_rdma_devices(settings.devices)
    try:
        from mooncake import engine as binding  # needs system libraries: fail with their names
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded ({error}): {_SYSTEM_LIBRARIES}") from error
    freeing_of(binding.__file__)
    engine = binding.TransferEngine()
    if status := engine.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, ",".join(settings.devices)):
        raise ConfigError(
            f"Mooncake cannot start on {settings.host} with transfer_protocol {settings.protocol!r} (status {status})"
        )
    try:
        require_taken(settings.protocol, settings.host, engine.get_rpc_port())
    except ConfigError:
        free_engine(engine)
        raise
    return engine


def _submits_of(settings: TransportSettings, engine: Any) -> Submits:
    from mooncake import engine as binding  # loaded already: ``engine`` is one of its objects

    load = partial(ctypes.PyDLL, binding.__file__)
    return choose_submits(settings.protocol, settings.writes_per_submit, engine, load)


def _set_environment(protocol: str) -> None:
    """Sets the variables that Mooncake reads when an engine is constructed. Keeps those that the user has set, and
    replaces those that we set for an earlier engine of this process."""
    while _forced:
        os.environ.pop(_forced.pop(), None)
    needed = environment_of(protocol, os.environ)
    _forced.update(needed.keys() - os.environ.keys())
    for name, value in {**_DEFAULTS, **needed}.items():
        os.environ.setdefault(name, value)


def _require_own_address(host: str) -> None:
    """``host`` is an address of this machine. With another one Mooncake 0.3.13 fails at the first write (measured).

    Raises:
        ConfigError: It is not.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
    except OSError as error:
        raise ConfigError(f"{host} is not an address of this machine ({error}): set host to one that is") from error
