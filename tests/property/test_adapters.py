"""The law of adapters: a content that is told for a load is what vLLM has read, whenever files change."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from drawn import drawn
from pdcluster_connector.core.adapters import (
    AdapterLoad,
    AdapterRequest,
    Digests,
    Files,
    FileStamp,
    ReadFailure,
    UnknownContent,
    load_of,
)
from pdcluster_protocol.adapters import AdapterContent, difference

ASKED = AdapterRequest(1, "sql", "/adapters/sql", "use")
CONTENTS = st.one_of(st.none(), st.builds(AdapterContent, *(st.sampled_from("ab") for _ in range(3))))


@dataclass
class Folder:
    """One file. Each write gives it another stamp, also a write of what was there."""

    content: str = "0"
    num_writes: int = 0

    def write(self, content: str) -> None:
        self.content, self.num_writes = content, self.num_writes + 1

    def files(self) -> Files:
        return Files("/adapters/sql", (FileStamp("weights", 1, 1, 1, self.num_writes, self.num_writes),))


@dataclass
class World:
    """A worker that loads, a thread that reads, and somebody who writes: in any order, also while one of them reads."""

    folder: Folder = field(default_factory=Folder)
    digests: Digests = field(default_factory=Digests)
    loads: list[tuple[AdapterLoad, str]] = field(default_factory=list)
    """Each load, and what vLLM has read."""

    def write(self, content: str) -> None:
        self.folder.write(content)

    def load(self, content: str, is_disturbed: bool) -> None:
        before = self.folder.files()
        read = self.folder.content
        if is_disturbed:
            self.folder.write(content)
        self.loads.append((load_of(ASKED, before, self.folder.files()), read))

    def read(self, content: str, is_disturbed: bool) -> None:
        """The thread reads the files of the newest load, as ``digest_of`` does: it looks at the stamp afterwards."""
        files = self.loads[-1][0].files if self.loads else None
        if files is None or not self.digests.is_wanted(files):
            return
        read = self.folder.content
        if is_disturbed:
            self.folder.write(content)
        if self.folder.files() == files:
            self.digests.found(files, f"digest {read}")
        else:
            self.digests.failed(files, ReadFailure("changed"))


STEPS = st.lists(st.tuples(st.sampled_from(["write", "load", "read"]), st.sampled_from("012"), st.booleans()))


@given(STEPS)
@settings(max_examples=drawn(400), deadline=None)
def test_a_content_that_is_told_is_what_vllm_has_read(steps: list[tuple[str, str, bool]]) -> None:
    world = World()
    for what, content, is_disturbed in steps:
        if what == "write":
            world.write(content)
        else:
            getattr(world, what)(content, is_disturbed)
        for load, read in world.loads:
            found = world.digests.content(load)
            if not isinstance(found, UnknownContent):
                assert found == AdapterContent("sql", f"digest {read}", "use")


@given(STEPS)
@settings(max_examples=drawn(200), deadline=None)
def test_an_adapter_that_is_loaded_and_read_in_peace_is_known(steps: list[tuple[str, str, bool]]) -> None:
    world = World()
    for what, content, is_disturbed in steps:
        getattr(world, what)(*((content,) if what == "write" else (content, is_disturbed)))
    world.load("0", is_disturbed=False)
    load, read = world.loads[-1]
    assert load.files is not None
    world.digests.loaded_again(load.files)
    world.read("0", is_disturbed=False)
    assert world.digests.content(load) == AdapterContent("sql", f"digest {read}", "use")


@given(CONTENTS, CONTENTS)
@settings(max_examples=drawn(200), deadline=None)
def test_engines_may_hand_over_if_and_only_if_content_and_use_are_equal(
    prefill: AdapterContent | None, decode: AdapterContent | None
) -> None:
    told = difference(prefill=prefill, decode=decode, prefill_id="p-1", decode_id="d-1")
    kinds = [(one.content, one.use) if one else None for one in (prefill, decode)]
    assert (told == "") == (kinds[0] == kinds[1])
    assert not told or ("p-1" in told and "d-1" in told)
