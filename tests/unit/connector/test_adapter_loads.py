"""Which load of an adapter a request computes with, and that a question for its content never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from patience import PATIENCE_S, until
from pdcluster_connector.adapter_files import CONFIG, WEIGHTS, digest_of, files_of
from pdcluster_connector.adapter_loads import MAX_LOADS, AdapterLoads
from pdcluster_connector.core.adapters import AdapterLoad, AdapterRequest, Files, UnknownContent
from pdcluster_protocol.adapters import AdapterContent


def put(folder: Path, weights: bytes) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in ((CONFIG, b"{}"), (WEIGHTS[0], weights)):
        (folder / "new").write_bytes(content)
        (folder / "new").replace(folder / name)


@contextmanager
def loads_of(digest: object = digest_of) -> Iterator[AdapterLoads]:
    made = AdapterLoads(digest)  # type: ignore[arg-type]  # a test's own reader
    yield made
    made.close(time.monotonic() + PATIENCE_S)


def asked(folder: Path, number: int = 1, name: str = "sql") -> AdapterRequest:
    return AdapterRequest(number, name, str(folder), "use")


def load(loads: AdapterLoads, what: AdapterRequest, *, is_resident: bool = True) -> None:
    """As vLLM's worker."""
    loads.loaded(what, loads.files_before(what), what.path, lambda: is_resident)


def content(loads: AdapterLoads, of: AdapterLoad) -> AdapterContent:
    give_up_at = time.monotonic() + PATIENCE_S
    while (
        isinstance(found := loads.content(of), UnknownContent) and not found.is_final and time.monotonic() < give_up_at
    ):
        time.sleep(0.001)
    assert isinstance(found, AdapterContent), found
    return found


def digest_now(folder: Path) -> str:
    files = files_of(str(folder))
    assert files is not None
    return digest_of(files)


def test_a_question_never_waits_for_the_files_and_is_answered_once_they_are_read(tmp_path: Path) -> None:
    put(tmp_path, b"old")
    may_read, reads = threading.Event(), list[Files]()

    def slow(files: Files) -> str:
        may_read.wait()
        reads.append(files)
        return digest_of(files)

    with loads_of(slow) as loads:
        load(loads, asked(tmp_path))
        step = loads.in_step(asked(tmp_path))
        for _ in range(3):
            assert loads.content(step) == UnknownContent(
                "the content of LoRA adapter 'sql' is not known: its files are still being read"
            )
        may_read.set()
        assert content(loads, step) == AdapterContent("sql", digest_now(tmp_path), "use")
        assert len(reads) == 1, "once for each stamp"


def test_what_vllm_holds_counts_and_not_what_lies_in_the_folder(tmp_path: Path) -> None:
    put(tmp_path, b"old")
    old = digest_now(tmp_path)
    with loads_of() as loads:
        load(loads, asked(tmp_path))
        held = loads.in_step(asked(tmp_path))
        assert content(loads, held).content == old
        put(tmp_path, b"new")
        assert loads.at_hand(asked(tmp_path)) == loads.in_step(asked(tmp_path)) == held
        load(loads, asked(tmp_path))
        assert content(loads, loads.at_hand(asked(tmp_path))).content == digest_now(tmp_path) != old


def test_what_vllm_will_read_counts_if_it_holds_the_adapter_no_more_or_reads_it_at_each_step(tmp_path: Path) -> None:
    put(tmp_path, b"old")
    with loads_of() as loads:
        load(loads, asked(tmp_path), is_resident=False)
        load(loads, asked(tmp_path, number=2))
        put(tmp_path, b"new")
        each_step = msgspec.structs.replace(asked(tmp_path, number=2), is_read_each_step=True)
        for what in (asked(tmp_path), each_step, asked(tmp_path, number=3), asked(tmp_path, 2, "another")):
            assert content(loads, loads.at_hand(what)).content == digest_now(tmp_path)


def test_what_vllm_holds_counts_however_many_other_adapters_were_loaded_since(tmp_path: Path) -> None:
    put(tmp_path, b"old")
    with loads_of() as loads:
        load(loads, asked(tmp_path))
        held = loads.in_step(asked(tmp_path))
        for number in range(2, MAX_LOADS + 2):
            load(loads, asked(tmp_path, number), is_resident=False)
        put(tmp_path, b"new")
        assert loads.at_hand(asked(tmp_path)) == loads.in_step(asked(tmp_path)) == held
        assert len(loads._loaded) == MAX_LOADS
        assert "before the connector" in loads.in_step(asked(tmp_path, 2)).problem, "vLLM holds it no more"
        assert loads.in_step(asked(tmp_path, MAX_LOADS + 1)) == held, "the newest is held from now on"


def test_files_that_could_not_be_read_once_are_read_for_the_next_request(tmp_path: Path) -> None:
    """An error of a network's file system passes, and vLLM does not load what it holds again."""
    put(tmp_path, b"old")
    errors = [OSError("input/output error")]

    def read(files: Files) -> str:
        if errors:
            raise errors.pop()
        return digest_of(files)

    with loads_of(read) as loads:
        load(loads, asked(tmp_path))
        step = loads.in_step(asked(tmp_path))
        assert until(lambda: not errors and not loads._queued)
        failed = loads.content(step)
        assert isinstance(failed, UnknownContent)
        assert failed.is_final
        assert "input/output error" in failed.reason
        assert until(lambda: not loads._queued)
        assert loads.content(step) == AdapterContent("sql", digest_now(tmp_path), "use")


def test_an_adapter_whose_content_cannot_be_known_says_why(tmp_path: Path) -> None:
    put(tmp_path, b"old")
    with loads_of() as loads:
        unseen = loads.content(loads.in_step(asked(tmp_path)))
        loads.loaded(asked(tmp_path), loads.files_before(asked(tmp_path)), None, lambda: True)
        nowhere = loads.content(loads.in_step(asked(tmp_path)))
        before = loads.files_before(asked(tmp_path))
        put(tmp_path, b"new")
        loads.loaded(asked(tmp_path), before, str(tmp_path), lambda: True)
        changed = loads.content(loads.in_step(asked(tmp_path)))
    for found, why in ((unseen, "before the connector"), (nowhere, "no folder"), (changed, "changed while vLLM")):
        assert isinstance(found, UnknownContent)
        assert found.is_final
        assert why in found.reason


def test_a_name_in_a_hub_is_known_while_vllm_holds_it_and_not_before_it_is_looked_for_again(tmp_path: Path) -> None:
    """vLLM asks the hub at each load, and takes the newest version."""
    put(tmp_path, b"old")
    hub = AdapterRequest(1, "sql", "somebody/sql", "use")
    held = {1}
    with loads_of() as loads:
        assert loads.files_before(hub) is None
        loads.loaded(hub, None, str(tmp_path), lambda: 1 in held)
        assert loads.at_hand(hub) == loads.in_step(hub)
        assert content(loads, loads.at_hand(hub)).content == digest_now(tmp_path)
        held.clear()
        found = loads.content(loads.at_hand(hub))
        assert isinstance(found, UnknownContent)
        assert found.is_final
        assert "in a hub" in found.reason
