"""A push asks for its grant with its adapter's content, later if need be, or is given up with the reason."""

from __future__ import annotations

import time

from patience import PATIENCE_S
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterLoad, Files, FileStamp
from pdcluster_connector.core.sending import Push, PushKey
from pdcluster_connector.settings import ADAPTER_WAIT_S
from pdcluster_connector.trace import Trace
from pdcluster_connector.worker.asking import Asker
from pdcluster_connector.worker.orders import StepBegun
from pdcluster_connector.worker.pushes import LivePush, PushBook
from pdcluster_protocol.adapters import AdapterContent
from pdcluster_protocol.ids import Attempt, BootId, RequestId, TransferId
from pdcluster_protocol.side_channel import Failed, Open, ToDecode

R = RequestId("r")
KEY = PushKey(TransferId("t"), Attempt(1))
LOAD = AdapterLoad("sql", "use", Files("/a", (FileStamp("w", 1, 1, 1, 1, 1),)))
AGAIN = AdapterLoad("sql", "use", Files("/a", (FileStamp("w", 1, 2, 1, 1, 1),)))
CONTENT = AdapterContent("sql", "digest", "use")


class Bench:
    """A lane's pushes and its asker. Files are read when a test says so."""

    def __init__(self) -> None:
        self.said: list[ToDecode] = []
        self.book = PushBook(self.said.append, lambda _: None, lambda _: None, Trace(""), lambda _: None)
        self.adapters = AdapterLoads(lambda _: "digest")
        self.adapters.close(time.monotonic() + PATIENCE_S)
        self.asker = Asker(self.book, BootId("d"), self.adapters)

    def add(self, adapter: AdapterLoad | None) -> LivePush:
        live = LivePush(Push(KEY, hold_s=1.0, deadline=100.0), R, "token", 32, 0.0, adapter)
        self.book.add(live)
        return live

    def read(self) -> None:
        """The thread has read the files."""
        assert LOAD.files is not None
        self.adapters._digests.found(LOAD.files, "digest")


def test_a_push_without_an_adapter_asks_at_once_and_says_none() -> None:
    bench = Bench()
    bench.asker.ask(bench.add(None), 0.0)
    assert bench.said == [Open(*KEY, BootId("d"), 100_000, "token", None)]


def test_a_push_asks_as_soon_as_the_content_is_known_and_once() -> None:
    bench = Bench()
    bench.asker.ask(bench.add(LOAD), 0.0)
    bench.asker.ask_late(1.0)
    assert bench.said == []
    bench.read()
    for now in (2.0, 3.0):
        bench.asker.ask_late(now)
    assert bench.said == [Open(*KEY, BootId("d"), 98_000, "token", CONTENT)]


def test_a_push_whose_content_stays_unknown_is_given_up_with_the_reason() -> None:
    bench = Bench()
    live = bench.add(LOAD)
    bench.asker.ask(live, 0.0)
    bench.asker.ask_late(ADAPTER_WAIT_S)
    (failed,) = bench.said
    assert isinstance(failed, Failed)
    assert "its files are still being read" in failed.reason
    assert live.push.is_ended


def test_a_push_whose_content_cannot_be_known_is_given_up_at_once() -> None:
    bench = Bench()
    bench.asker.ask(bench.add(AdapterLoad("sql", "use", problem="it is read by tensorizer")), 0.0)
    (failed,) = bench.said
    assert isinstance(failed, Failed)
    assert failed.reason == "the content of LoRA adapter 'sql' is not known: it is read by tensorizer"


def test_a_push_that_has_ended_meanwhile_asks_no_more() -> None:
    bench = Bench()
    live = bench.add(LOAD)
    bench.asker.ask(live, 0.0)
    bench.book.give_up(KEY, "prefill ended", 0.5)
    bench.read()
    bench.asker.ask_late(1.0)
    assert [type(message) for message in bench.said] == [Failed]


def test_a_prompt_whose_later_step_computes_with_another_load_is_given_up() -> None:
    bench = Bench()
    bench.read()
    live = bench.add(LOAD)
    bench.asker.ask(live, 0.0)
    bench.asker.require_same_load(live, StepBegun(2, 1.0, (), {R: LOAD}), 1.0)
    assert not live.push.is_ended
    bench.asker.require_same_load(live, StepBegun(3, 2.0, (), {R: AGAIN}), 2.0)
    failed = bench.said[-1]
    assert isinstance(failed, Failed)
    assert failed.reason == "LoRA adapter 'sql' was loaded again with other files while the prompt was computed"
