"""How writes are handed to Mooncake: each by a call of its own, or many by one call. Chosen once, at start.

With Mooncake's RDMA and Ascend transports each call costs a batch, a turn of a worker and, on Ascend, a job of a thread
pool with a ``TransferSync`` of its own, however few bytes it has (read in v0.3.13). Each call also gives up Python's
lock and has to get it back from a forward thread that launches kernels.

Mooncake's Python API can submit many writes, but can then only wait for them, which spins a core. In its C++ API
``getTransferStatus(batch, n)`` looks at one write and never waits. We call it by its symbol, like ``freeEngine``. The
wheels -non-cuda, -npu and CUDA 12 of 0.3.13.post1 and -cuda13 0.3.14 have it. ``choose_submits`` tries it first.

    one call each    transfer_submit_write        transfer_check_status: frees the batch when it is over
    one call for n   batch_transfer_async_write   getTransferStatus until all n are over, then freeBatchID
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from pdcluster_connector.transport.base import WriteRange, WriteStatus
from pdcluster_protocol.errors import TransferError
from pdcluster_protocol.launch import TransferProtocol

_LOG: Final = logging.getLogger("vllm.pdcluster.transport")

_DEFAULTS: Final = {TransferProtocol.TCP: 1, TransferProtocol.RDMA: 128, TransferProtocol.ASCEND: 128}
"""Writes in one call. 128: a lane then has eight calls in flight, and Ascend's pool has eight threads."""

_ALLOCATE: Final = "_ZN8mooncake14TransferEngine15allocateBatchIDEm"
_FREE: Final = "_ZN8mooncake14TransferEngine11freeBatchIDEm"
_STATUS: Final = "_ZN8mooncake14TransferEngine17getTransferStatusEmmRNS_9Transport14TransferStatusE"
_COMPLETED, _FAILED = 4, 6
_UNDER_WAY: Final = frozenset((0, 1, 5))
"""Waiting, pending and timed out. A timed-out write still goes on: Mooncake has only stopped waiting for it."""


class Submitted(Protocol):
    """The writes that one call has submitted."""

    def status(self) -> WriteStatus:
        """How far the writes are. Asked until it is not PENDING, then never again."""


class Submits(Protocol):
    """One way to hand writes to one engine. Any thread."""

    @property
    def writes_per_submit(self) -> int: ...

    def submit(self, session: str, ranges: Sequence[WriteRange]) -> Submitted:
        """``ranges`` are under way.

        Raises:
            TransferError: For certain none of them is.
        """


class KnownEnd:
    """A submit whose status is known without asking Mooncake."""

    def __init__(self, status: WriteStatus) -> None:
        self._status = status

    def status(self) -> WriteStatus:
        return self._status


class SingleSubmits:
    """Submits each write by a call of its own."""

    writes_per_submit = 1

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def submit(self, session: str, ranges: Sequence[WriteRange]) -> Submitted:
        ((source, target, num_bytes),) = ranges
        batch = self._engine.transfer_submit_write(session, source, target, num_bytes)
        if batch <= 0:
            raise TransferError(f"Mooncake refused a write of {num_bytes} bytes (status {batch})")
        return _Single(self._engine, batch)


class _Single:
    __slots__ = ("_batch", "_engine")

    def __init__(self, engine: Any, batch: int) -> None:
        self._engine, self._batch = engine, batch

    def status(self) -> WriteStatus:
        status = self._engine.transfer_check_status(self._batch)
        if status == 0:
            return WriteStatus.PENDING
        if status > 0:
            return WriteStatus.DONE
        # Mooncake says -1 of a write that failed, and -2 of one that its own timeout gave up: that one may still read.
        return WriteStatus.FAILED if status == -1 else WriteStatus.LOST


class BatchSubmits:
    """Submits up to ``writes_per_submit`` writes by one call."""

    def __init__(self, engine: Any, batches: Batches, writes_per_submit: int) -> None:
        self._engine = engine
        self._batches = batches
        self.writes_per_submit = writes_per_submit

    def submit(self, session: str, ranges: Sequence[WriteRange]) -> Submitted:
        sources, targets, sizes = (list(column) for column in zip(*ranges, strict=True))
        batch = self._engine.batch_transfer_async_write(session, sources, targets, sizes)
        if batch <= 0:
            # Mooncake may have given the batch up in the middle. It does not say which writes it had begun.
            _LOG.warning("Mooncake refused a submit writes=%d", len(ranges))
            return KnownEnd(WriteStatus.LOST)
        return _Many(self._batches, batch, len(ranges))


class _Many:
    """The writes of one batch. Each is looked at until it is over, in order: after one has failed others may go on."""

    def __init__(self, batches: Batches, batch: int, num_writes: int) -> None:
        self._batches, self._batch, self._num_writes = batches, batch, num_writes
        self._num_over = 0
        self._has_failed = False

    def status(self) -> WriteStatus:
        while self._num_over < self._num_writes:
            status = self._batches.status(self._batch, self._num_over)
            if status is WriteStatus.PENDING or status is WriteStatus.LOST:
                return status
            self._has_failed = self._has_failed or status is WriteStatus.FAILED
            self._num_over += 1
        self._batches.free(self._batch)
        return WriteStatus.FAILED if self._has_failed else WriteStatus.DONE


class Batches(Protocol):
    """Mooncake's C++ calls about batches. None of them waits."""

    def status(self, batch: int, number: int) -> WriteStatus:
        """The status of one write; LOST: Mooncake gave an answer that we do not know."""

    def free(self, batch: int) -> None:
        """Frees a batch whose writes are all over. The caller never names it again."""


class _MooncakeStatus(ctypes.Structure):
    """``mooncake::Status``: a code of 16 bits, and a text that we do not read.

    It is declared longer than it is. C++ returns a class through a pointer from the caller, and ctypes passes such a
    pointer only for structures of more than two words.
    """

    _fields_ = (("code", ctypes.c_uint16), ("rest", ctypes.c_uint64 * 7))


class _TransferStatus(ctypes.Structure):
    _fields_ = (("state", ctypes.c_int), ("num_bytes", ctypes.c_size_t))


class LibraryBatches:
    """Calls symbols of ``library``. We keep Python's lock in these calls: they are short, and getting it back costs."""

    def __init__(self, library: Any, engine: int) -> None:
        """``engine``: ``get_engine_ptr()``.

        Raises:
            AttributeError: The library lacks a symbol.
        """
        self._engine = ctypes.c_void_p(engine)
        self._allocate = _function(library, _ALLOCATE, ctypes.c_uint64, ctypes.c_size_t)
        self._free = _function(library, _FREE, _MooncakeStatus, ctypes.c_uint64)
        self._status = _function(
            library, _STATUS, _MooncakeStatus, ctypes.c_uint64, ctypes.c_size_t, ctypes.POINTER(_TransferStatus)
        )

    @property
    def answers(self) -> bool:
        """Whether the calls behave as we know them: an empty batch has no first write, and can be freed."""
        batch = self._allocate(self._engine, 0)
        has_write = self._status(self._engine, batch, 0, ctypes.byref(_TransferStatus())).code == 0
        return not has_write and self._free(self._engine, batch).code == 0

    def status(self, batch: int, number: int) -> WriteStatus:
        found = _TransferStatus()
        if self._status(self._engine, batch, number, ctypes.byref(found)).code:
            return WriteStatus.LOST
        if found.state in _UNDER_WAY:
            return WriteStatus.PENDING
        return {_COMPLETED: WriteStatus.DONE, _FAILED: WriteStatus.FAILED}.get(found.state, WriteStatus.LOST)

    def free(self, batch: int) -> None:
        if code := self._free(self._engine, batch).code:
            _LOG.warning("Mooncake kept a batch code=%d", code)


def _function(library: Any, name: str, returns: Any, *takes: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = returns, (ctypes.c_void_p, *takes)
    return function


def choose_submits(protocol: str, wanted: int, engine: Any, load: Callable[[], Any]) -> Submits:
    """How writes are handed to ``engine``, a binding's object; ``load`` gives that binding's library (``PyDLL``).

    ``wanted``: writes in one call; 0: what fits ``protocol``. Each call has one write if Mooncake lacks the symbols for
    more, or answers otherwise than 0.3.13.
    """
    number = wanted or _DEFAULTS[TransferProtocol(protocol)]
    if number == 1:
        return SingleSubmits(engine)
    try:
        batches = LibraryBatches(load(), engine.get_engine_ptr())
    except (AttributeError, OSError) as error:
        _LOG.warning("batches not used, each write is a call of its own reason=%s", error)
        return SingleSubmits(engine)
    if not batches.answers:
        _LOG.warning("batches not used, each write is a call of its own reason=answers differ from Mooncake 0.3.13")
        return SingleSubmits(engine)
    return BatchSubmits(engine, batches, number)
