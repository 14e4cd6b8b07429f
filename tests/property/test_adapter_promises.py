"""The law of promises: the first step of a request computes with the adapter as it was when the request was announced.

All ranks then have the same. Whatever happens in between: other files take the names, vLLM drops the adapter, other
requests or an API call let it read the files, requests come and go.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from patience import PATIENCE_S
from pdcluster_connector.adapter_files import CONFIG, WEIGHTS, files_of
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterRequest, Files
from pdcluster_protocol.ids import RequestId


@dataclass
class Rank:
    """A decode worker, of which vLLM has room for one adapter."""

    asked: AdapterRequest
    loads: AdapterLoads = field(default_factory=lambda: AdapterLoads(lambda _: "digest"))
    held: bytes | None = None
    """The weights that vLLM holds."""

    def read(self) -> None:
        """As ``vllm/adapters.py`` lets vLLM read."""
        kept, before = self.loads.promises.replacement(self.asked), self.loads.files_before(self.asked)
        if kept is None:
            self.held = (Path(self.asked.path) / WEIGHTS[0]).read_bytes()
        else:
            with kept.named() as folder:
                self.held = (Path(folder) / WEIGHTS[0]).read_bytes()
        held = self.held
        self.loads.loaded(self.asked, before, self.asked.path, lambda: self.held == held, kept)


@dataclass
class World:
    """Two ranks, and somebody who copies new files."""

    folder: Path
    num_writes: int = 0
    weights: dict[Files, bytes] = field(default_factory=dict)
    promised: dict[RequestId, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        asked = AdapterRequest(1, "sql", str(self.folder), "use")
        self.ranks = (Rank(asked), Rank(asked))
        self.write()

    def write(self) -> None:
        self.num_writes += 1
        for name, content in ((CONFIG, b"{}"), (WEIGHTS[0], b"%d" % self.num_writes)):
            (self.folder / "new").write_bytes(content)
            (self.folder / "new").replace(self.folder / name)
        files = files_of(str(self.folder))
        assert files is not None
        self.weights[files] = b"%d" % self.num_writes

    def evict(self) -> None:
        for rank in self.ranks:
            rank.held = None

    def read(self) -> None:
        """An API call loads the adapter."""
        for rank in self.ranks:
            rank.read()

    def run(self) -> None:
        """A step of a request without KV of others."""
        for rank in self.ranks:
            if rank.held is None:
                rank.read()

    def come(self, number: int) -> None:
        name = RequestId(str(number))
        if name not in self.promised:
            one, other = (rank.loads.promise(name, rank.asked).files for rank in self.ranks)
            assert one is not None
            assert one == other
            self.promised[name] = self.weights[one]

    def begin(self, number: int) -> None:
        if (name := RequestId(str(number))) in self.promised:
            self.run()
            assert [rank.held for rank in self.ranks] == [self.promised[name]] * len(self.ranks)
            self.leave(number)

    def leave(self, number: int) -> None:
        self.promised.pop(RequestId(str(number)), None)
        for rank in self.ranks:
            rank.loads.promises.release(RequestId(str(number)))


PLAIN = st.sampled_from(["write", "evict", "read", "run"])
OF_A_REQUEST = st.tuples(st.sampled_from(["come", "begin", "leave"]), st.sampled_from([1, 2, 3]))


@given(st.lists(st.one_of(PLAIN, OF_A_REQUEST), max_size=25))
@settings(max_examples=drawn(300), deadline=None)
def test_a_request_begins_on_all_ranks_with_the_adapter_that_it_was_announced_with(
    steps: list[str | tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for step in steps:
            if isinstance(step, str):
                getattr(world, step)()
            else:
                getattr(world, step[0])(step[1])
        for number in (1, 2, 3):
            world.begin(number)
        for rank in world.ranks:
            assert not rank.loads.promises._promises
            rank.loads.close(time.monotonic() + PATIENCE_S)
