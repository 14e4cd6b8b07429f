"""News of a request with an adapter wait for its content, in their order, and the content is looked at once more."""

from __future__ import annotations

import time
from pathlib import Path

from patience import PATIENCE_S
from pdcluster_connector.adapter_files import CONFIG, WEIGHTS
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterRequest, UnknownContent
from pdcluster_connector.settings import ADAPTER_WAIT_S
from pdcluster_connector.steps import Cancel, Expect, PrefillEnded
from pdcluster_connector.worker.held_news import HeldNews, News, RequestAdapter
from pdcluster_protocol.adapters import AdapterContent
from pdcluster_protocol.ids import Attempt, RequestId, TransferId

R, PLAIN = RequestId("r"), RequestId("plain")
ENDED = PrefillEnded(R, Attempt(1))
WITHOUT = Expect(PLAIN, TransferId("u"), 1000, ())


class Bench:
    """A decode rank's news. The thread reads no files before a test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.put(b"old")
        self.adapters = AdapterLoads(lambda files: str(files.stamps[1].num_bytes))
        self.adapters.close(time.monotonic() + PATIENCE_S)
        self.asked = AdapterRequest(1, "sql", str(folder), "use")
        self.held = HeldNews(self.adapters)
        self.expect = Expect(R, TransferId("t"), 1000, (), adapter=self.asked)

    def put(self, weights: bytes) -> None:
        for name, content in ((CONFIG, b"{}"), (WEIGHTS[0], weights)):
            (self.folder / "new").write_bytes(content)
            (self.folder / "new").replace(self.folder / name)

    def read(self, digest: str) -> None:
        files = self.adapters.at_hand(self.asked).files
        assert files is not None
        self.adapters._digests.found(files, digest)

    def taken(self) -> RequestAdapter:
        found = self.held.take(R)
        assert found is not None
        return found

    def spoil_the_list(self) -> None:
        """vLLM's list of adapters cannot be copied."""

        def fail() -> bool:
            raise KeyError("of vLLM's list")

        self.adapters.loaded(self.asked, self.adapters.files_before(self.asked), str(self.folder), fail)

    def due(self, now: float, *news: News) -> list[News]:
        return [item for item, _ in self.held.due([(item, now) for item in news], now)]


def test_a_request_waits_for_its_content_with_all_that_follows_and_no_other_request_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.due(0.0, bench.expect, WITHOUT) == [WITHOUT]
    assert bench.due(1.0, ENDED) == []
    bench.read("old")
    assert bench.due(2.0) == [bench.expect, ENDED]
    assert bench.held.content(R) == AdapterContent("sql", "old", "use")
    assert (bench.held.content(PLAIN), len(bench.held)) == (None, 0)


def test_a_request_whose_content_stays_unknown_is_told_with_the_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.due(0.0, bench.expect) == []
    assert bench.due(ADAPTER_WAIT_S) == [bench.expect]
    found = bench.held.content(R)
    assert isinstance(found, UnknownContent)
    assert "its files are still being read" in found.reason


def test_a_request_that_is_cancelled_waits_no_more(tmp_path: Path) -> None:
    bench, cancel = Bench(tmp_path), Cancel(R, "the client left")
    assert bench.due(0.0, bench.expect) == []
    assert bench.due(1.0, cancel) == [bench.expect, cancel]


def test_an_adapter_that_was_loaded_again_while_its_kv_came_is_told_and_another_is_not(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.read("old")
    assert bench.due(0.0, bench.expect) == [bench.expect]
    before = bench.taken()
    assert bench.held.change(before) == ""
    assert bench.due(1.0, bench.expect) == [bench.expect]
    bench.put(b"newer")
    assert bench.held.take(R) == before
    assert bench.held.change(before) == (
        "decode has loaded LoRA adapter 'sql' again, with other files, while the KV was on its way"
    )
    assert (bench.held.take(R), bench.held.take(PLAIN)) == (None, None)


def test_an_error_of_a_look_at_one_adapter_costs_its_request_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.read("old")
    bench.spoil_the_list()
    assert bench.due(0.0, WITHOUT, bench.expect, ENDED) == [WITHOUT, bench.expect, ENDED]
    found = bench.held.content(R)
    assert isinstance(found, UnknownContent)
    assert found.is_final
    assert "LoRA adapter 'sql' cannot be looked up" in found.reason
    before = bench.taken()
    assert bench.held.change(before) == "", "it is no other than before, and the request has failed already"


def test_an_error_of_the_last_look_is_the_reason_why_kv_is_not_used(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.read("old")
    assert bench.due(0.0, bench.expect) == [bench.expect]
    before = bench.taken()
    bench.spoil_the_list()
    assert "cannot be looked up: KeyError" in bench.held.change(before)
