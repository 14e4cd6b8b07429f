"""The law of first steps: no answer of decode is of one adapter's KV and of another adapter's weights.

Whatever happens between a request's announcement and its first step: other files take the names, vLLM drops the
adapter, other requests or an API call let it read the files, requests end early.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from patience import PATIENCE_S
from pdcluster_connector.adapter_files import CONFIG, WEIGHTS, files_of
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterRequest, Files
from pdcluster_connector.failures import TransferFailure, take_counts
from pdcluster_connector.settings import ADAPTER_WAIT_S
from pdcluster_connector.steps import DecodeStep, Expect, FirstStep
from pdcluster_connector.worker.first_steps import FirstStepJudge
from pdcluster_connector.worker.held_news import HeldNews, RequestAdapter
from pdcluster_protocol.adapters import AdapterContent
from pdcluster_protocol.ids import RequestId, TransferId

T = TransferId("t")
COMING, HERE, RECEIVED = "its KV comes", "its wait has ended", "decode's scheduler knows"


@dataclass
class Request:
    asked: AdapterRequest
    state: str = COMING
    kv_of: str = ""
    """The digest of the adapter with which prefill has computed."""
    adapter: RequestAdapter | None = None
    has_kv: bool = False


@dataclass
class Rank:
    """A decode worker with room for one adapter, and somebody who copies new files. One thread finds the digests."""

    folder: Path
    held: Files | None = None
    """The files that vLLM has read last, while it holds the adapter."""
    is_read_each_step: bool = False
    digests: dict[Files, str] = field(default_factory=dict)
    seen: set[Files] = field(default_factory=set)
    requests: dict[RequestId, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loads = AdapterLoads(lambda _: "never called")
        self.loads.close(time.monotonic() + PATIENCE_S)
        self.news, self.first_steps = HeldNews(self.loads), FirstStepJudge(self.loads)
        self.put(1)

    def files(self) -> Files:
        found = files_of(str(self.folder))
        assert found is not None
        return found

    def asked(self) -> AdapterRequest:
        return AdapterRequest(1, "sql", str(self.folder), "use", self.is_read_each_step)

    def put(self, content: int) -> None:
        for name, weights in ((CONFIG, b"{}"), (WEIGHTS[0], b"%d" % content)):
            (self.folder / "new").write_bytes(weights)
            (self.folder / "new").replace(self.folder / name)
        self.digests[self.files()] = str(content)

    def evict(self) -> None:
        self.held = None

    def read(self) -> None:
        """An API call with ``load_inplace``, or vLLM in a step."""
        self.held = files = self.files()
        self.loads.loaded(self.asked(), files, str(self.folder), lambda: self.held is files)

    def reload(self) -> None:
        self.is_read_each_step = True
        self.read()

    def run(self, asked: AdapterRequest) -> None:
        if self.held is None or asked.is_read_each_step:
            self.read()

    def digest(self) -> None:
        """The thread has read all files that were asked for."""
        for files in list(self.loads._queued):
            self.loads._digests.found(files, self.digests[files])
            self.loads._queued.discard(files)
            self.seen.add(files)

    def announce(self, name: RequestId) -> None:
        if name in self.requests:
            return
        request = self.requests[name] = Request(self.asked())
        expect = Expect(name, T, 1000, (), adapter=request.asked)
        if not self.news.due([(expect, 0.0)], 0.0):
            self.digest()
            self.news.due([], ADAPTER_WAIT_S)
        found = self.news.content(name)
        assert isinstance(found, AdapterContent)
        request.kv_of = found.content

    def come(self, name: RequestId) -> None:
        """All KV is here."""
        if (request := self.requests.get(name)) and request.state == COMING:
            request.state, request.adapter = HERE, self.news.take(name)
            assert request.adapter is not None
            request.has_kv = not self.news.change(request.adapter)

    def report(self, name: RequestId) -> None:
        if (request := self.requests.get(name)) and request.state == HERE:
            request.state = RECEIVED
            self.first_steps.ended(name, request.adapter, is_received=request.has_kv)

    def begin(self, name: RequestId) -> None:
        request = self.requests.get(name)
        if request is None or request.state != RECEIVED or not request.has_kv:
            return
        self.first_steps.begin_step(DecodeStep(first_steps=(FirstStep(name, T, 7),)))
        self.run(request.asked)
        is_failed = self.first_steps.take_foreign_blocks() == {7}
        del self.requests[name]
        assert self.held is not None
        assert is_failed or self.digests[self.held] == request.kv_of, "an answer of both"
        assert not is_failed or self.digests[self.held] != request.kv_of or self.held not in self.seen

    def leave(self, name: RequestId) -> None:
        """The request ends without a first step. Its wait may end later."""
        if request := self.requests.pop(name, None):
            self.first_steps.begin_step(DecodeStep(left=(name,)))
            adapter = request.adapter or self.news.take(name)
            if request.state != RECEIVED:
                self.first_steps.ended(name, adapter, is_received=True)


PLAIN = st.sampled_from(["evict", "read", "reload", "digest"])
PUT = st.tuples(st.just("put"), st.sampled_from([1, 2]))
NAMES = [RequestId(name) for name in "abc"]
OF_A_REQUEST = st.tuples(st.sampled_from(["announce", "come", "report", "begin", "leave"]), st.sampled_from(NAMES))


@given(st.lists(st.one_of(PLAIN, PUT, OF_A_REQUEST, OF_A_REQUEST), max_size=40))
@settings(max_examples=drawn(600), deadline=None)
def test_no_request_runs_on_with_other_weights_than_its_kv_is_of(steps: list[str | tuple[str, object]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rank = Rank(Path(folder))
        for step in steps:
            name, args = (step, ()) if isinstance(step, str) else (step[0], step[1:])
            getattr(rank, name)(*args)
        for request_id in NAMES:
            rank.leave(request_id)
        assert (rank.first_steps._held, rank.first_steps._left, rank.first_steps._begun) == ({}, set(), ())


def test_a_request_whose_block_is_not_told_goes_on_and_is_counted(tmp_path: Path) -> None:
    rank, name = Rank(tmp_path), NAMES[0]
    rank.announce(name)
    rank.come(name)
    rank.report(name)
    rank.put(2)
    rank.first_steps.begin_step(DecodeStep(first_steps=(FirstStep(name, T, None),)))
    rank.run(msgspec.structs.replace(rank.asked(), is_read_each_step=True))
    take_counts()
    assert rank.first_steps.take_foreign_blocks() == set()
    assert take_counts() == {TransferFailure.ADAPTER_MIXED.value: 1}


def test_every_request_is_judged_that_begins_in_one_step_or_before_the_next_look(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    for name in NAMES:
        rank.announce(name)
        rank.come(name)
        rank.report(name)
    a, b, c = NAMES
    rank.first_steps.begin_step(DecodeStep(first_steps=(FirstStep(a, T, 1), FirstStep(b, T, 2))))
    rank.first_steps.begin_step(DecodeStep(first_steps=(FirstStep(c, T, 3),)))
    rank.put(2)
    rank.read()
    assert rank.first_steps.take_foreign_blocks() == {1, 2, 3}


def test_files_whose_digest_was_dropped_meanwhile_are_known_by_their_stamps(tmp_path: Path) -> None:
    rank, name = Rank(tmp_path), NAMES[0]
    rank.announce(name)
    rank.come(name)
    rank.report(name)
    rank.loads._digests._known.clear()
    rank.first_steps.begin_step(DecodeStep(first_steps=(FirstStep(name, T, 7),)))
    rank.read()
    assert rank.first_steps.take_foreign_blocks() == set()
