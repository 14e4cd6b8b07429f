"""Tries whether the device's events are honest when a thread that has entered the device asks for them, as lanes do.

    forward thread   work ---> mark into memory ---> event
    watching thread                                    event? memory? ... event? memory?

The evidence is the mark in memory, not a clock: ``judging.py`` says what follows from each pair of answers. A clock
only decides how much work is given, so that the first question comes while the work is under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Protocol, TypeAlias

import torch

from pdcluster_connector.device import Device, DeviceEvent, Stream
from pdcluster_connector.self_test.judging import EventVerdict, Look, Patience, count_for, events_problem, judge
from pdcluster_protocol.errors import ConfigError

_LOG: Final = logging.getLogger("vllm.pdcluster.self_test")
_PATIENCE: Final = Patience()
_LENGTHS_S: Final = (0.03, 0.1, 0.3)
"""Lengths of the work. The next one is tried only if the device was done before the first question."""
_BETWEEN_LOOKS_S: Final = 0.001
_MEASURED_S: Final = 0.005
"""Least time that a measurement takes, unless it has ``_MOST_MEASURED`` products. A call and a wait take far less."""
_MOST_MEASURED: Final = 4096
_SIDE: Final = 2048
"""Rows of the square matrices: 16 MiB each. On an H100 a product takes 0.3 ms, far longer than its launch (5 us)."""
_MARGIN_S: Final = 30.0
"""Time that the watching thread gets in addition to the device's."""


class LongWork(Protocol):
    """Work that keeps the forward pass's stream busy."""

    def give(self, mark: int, length_s: float) -> None:
        """The current stream is busy for about ``length_s``, and then writes ``mark``. Forward thread."""

    def is_written(self, mark: int, reader: Stream) -> bool:
        """Whether ``mark`` is in memory, read on ``reader``, beside the forward pass. Only for the thread that opened
        ``reader``."""


class Products:
    """Work of about the length that is asked for, in products of matrices."""

    def __init__(self, device: Device, where: torch.device, side: int = _SIDE) -> None:
        with device.open_stream(where):
            self._factor = torch.ones((side, side), device=where)
            self._product = torch.zeros((side, side), device=where)
            self._mark = torch.zeros(1, dtype=torch.int32, device=where)
            self._wait()
        self._measured: tuple[int, float] | None = None

    def give(self, mark: int, length_s: float) -> None:
        self._measured = self._measured or self._measure()
        self._multiply(count_for(length_s, *self._measured))
        self._mark.fill_(mark)

    def is_written(self, mark: int, reader: Stream) -> bool:
        with reader:
            return int(self._mark.item()) == mark

    def _measure(self) -> tuple[int, float]:
        """A number of products and the seconds that they take. A first product, which may take longer, is left out."""
        self._multiply(1)
        self._wait()
        count = 1
        while True:
            begun_s = time.monotonic()
            self._multiply(count)
            self._wait()
            took_s = time.monotonic() - begun_s
            if took_s >= _MEASURED_S or count >= _MOST_MEASURED:
                return count, took_s
            count *= 4

    def _multiply(self, count: int) -> None:
        for _ in range(count):
            torch.matmul(self._factor, self._factor, out=self._product)

    def _wait(self) -> None:
        """The current stream has done its work. Waits for it."""
        self._mark.item()


@dataclass(frozen=True, slots=True)
class _Question:
    event: DeviceEvent
    mark: int
    begun_s: float


_Judged: TypeAlias = EventVerdict | Exception


class _Watcher:
    """Asks for events in a thread of its own, as a lane does. Owned by the forward thread."""

    def __init__(self, device: Device, where: torch.device, work: LongWork, patience: Patience) -> None:
        self._device, self._where, self._work, self._patience = device, where, work, patience
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._answers: SimpleQueue[_Judged] = SimpleQueue()
        # A thread that hangs in a driver must not keep the process from ending.
        self._thread = threading.Thread(target=self._main, name="pdcluster-self-test", daemon=True)
        self._thread.start()
        self.first = self.answer()
        """GO_ON: the thread has entered the device."""

    def ask(self, question: _Question) -> None:
        self._questions.put(question)

    def answer(self) -> EventVerdict:
        """The thread's verdict; STUCK if there is none in time.

        Raises:
            Exception: The thread has raised it while it asked the device.
        """
        try:
            answer = self._answers.get(timeout=self._patience.work_s + self._patience.late_s + _MARGIN_S)
        except Empty:
            return EventVerdict.STUCK
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(_MARGIN_S)

    def _main(self) -> None:
        try:
            self._device.enter_thread()
            reader = self._device.open_stream(self._where)
            self._answers.put(EventVerdict.GO_ON)
            while (question := self._questions.get()) is not None:
                self._answers.put(self._watch(question, reader))
        except Exception as error:  # noqa: BLE001  # top of a thread; ``answer`` raises it
            self._answers.put(error)

    def _watch(self, question: _Question, reader: Stream) -> EventVerdict:
        looks: list[Look] = []
        while True:
            says_done = self._device.is_done(question.event)
            is_written = self._work.is_written(question.mark, reader)
            looks.append(Look(time.monotonic(), says_done, is_written))
            if (verdict := judge(looks, question.begun_s, self._patience)) is not EventVerdict.GO_ON:
                return verdict
            time.sleep(_BETWEEN_LOOKS_S)


def require_honest_events(device: Device, where: torch.device) -> None:
    """Events of ``where`` complete when their work does, as far as a trial shows. Engine start, in the forward thread.
    Takes some tenths of a second.

    Raises:
        ConfigError: They do not, or the device cannot be asked.
    """
    try:
        verdict = _translated(where, lambda: try_events(device, where, Products(device, where)))
    except torch.OutOfMemoryError:
        _LOG.warning("self-test of events left out, no 32 MiB are free device=%s", where)
        return
    if verdict is EventVerdict.UNSEEN:
        _LOG.warning("self-test of events saw nothing, all work was done before each question device=%s", where)


def try_events(device: Device, where: torch.device, work: LongWork, patience: Patience = _PATIENCE) -> EventVerdict:
    """HONEST, or UNSEEN if every question came after the work.

    Raises:
        ConfigError: Events are not honest, or the device cannot be asked.
    """
    verdict = _translated(where, lambda: _try(device, where, work, patience))
    if problem := events_problem(verdict, str(where), patience):
        raise ConfigError(problem)
    return verdict


def _translated(where: torch.device, ask: Callable[[], EventVerdict]) -> EventVerdict:
    """The answer of ``ask``. Some builds of PyTorch raise a plain ``RuntimeError`` when memory is used up.

    Raises:
        OutOfMemoryError: The device's memory is used up.
        ConfigError: The device cannot be asked, or ``ask`` found its events dishonest.
    """
    try:
        return ask()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        raise ConfigError(
            f"device {where} cannot be asked for an event in a thread of its own ({error}): update its driver and "
            "PyTorch's build for it, or use another device"
        ) from error


def _try(device: Device, where: torch.device, work: LongWork, patience: Patience) -> EventVerdict:
    watcher = _Watcher(device, where, work, patience)
    verdict = EventVerdict.UNSEEN
    try:
        if watcher.first is not EventVerdict.GO_ON:
            return watcher.first
        for mark, length_s in enumerate(_LENGTHS_S, 1):
            work.give(mark, length_s)
            watcher.ask(_Question(device.record(), mark, time.monotonic()))
            if (verdict := watcher.answer()) is not EventVerdict.UNSEEN:
                break
    finally:
        watcher.close()
    return verdict
