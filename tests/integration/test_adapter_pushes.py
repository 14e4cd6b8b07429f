"""Pushes of prompts with LoRA adapters between two ranks: what a lane says of one, and what decode makes of its KV."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec

from integration.ranks import LIFE, Cache, Pair, Shape, expect, fingerprint_of, make_pair, prefill_rank
from integration.test_lane_ends import BOOT, DecodeByHand, slice_for
from patience import PATIENCE_S, until
from pdcluster_connector.adapter_loads import AdapterLoads
from pdcluster_connector.core.adapters import AdapterRequest
from pdcluster_connector.settings import Settings
from pdcluster_connector.steps import DecodeStep, FirstStep, PrefillStep
from pdcluster_connector.worker.prefill import PrefillWorker
from pdcluster_protocol.ids import EngineId, RequestId, TransferId
from pdcluster_protocol.labels import Role
from pdcluster_protocol.side_channel import Failed, Hello, Open, Welcome
from unit.connector.test_adapter_loads import content, digest_now, load, put


def compute(worker: PrefillWorker, decode: DecodeByHand, asked: AdapterRequest, *, is_last: bool) -> None:
    """A step of the prompt."""
    part = msgspec.structs.replace(slice_for(decode.address), adapter=asked, is_last=is_last)
    worker.begin_step(PrefillStep(LIFE, (part,)))
    worker.end_step()


def test_a_lane_asks_with_the_load_of_the_step_and_gives_a_prompt_of_two_loads_up(tmp_path: Path) -> None:
    put(tmp_path, b"old")
    shape, loads, asked = Shape(), AdapterLoads(), AdapterRequest(1, "sql", str(tmp_path), "use")
    decode, old = DecodeByHand(shape), digest_now(tmp_path)
    layout = decode.cache.memory(fingerprint_of(shape)).layout
    load(loads, asked, is_resident=False)
    content(loads, loads.in_step(asked))  # read before they change
    put(tmp_path, b"new")
    with (
        closing(decode.channel),
        prefill_rank(Cache(shape), Settings(), adapters=loads) as rank,
        closing(rank.sessions.open()) as target,
    ):
        compute(rank.worker, decode, asked, is_last=False)
        decode.hear(Hello)
        decode.channel.send(decode.peer, Welcome(EngineId("decode"), BOOT, target.session, layout))
        opening = decode.hear(Open)
        assert opening.adapter is not None
        assert opening.adapter.content == old
        load(loads, asked)
        compute(rank.worker, decode, asked, is_last=True)
        assert "was loaded again with other files" in decode.hear(Failed).reason
    loads.close(time.monotonic() + PATIENCE_S)


@contextmanager
def pair_with_adapter(folder: Path) -> Iterator[tuple[Pair, dict[Role, AdapterLoads], AdapterRequest]]:
    """Both ranks have loaded the adapter from ``folder``, whose weights are ``old``."""
    put(folder, b"old")
    loads = {role: AdapterLoads() for role in Role}
    asked = AdapterRequest(1, "sql", str(folder), "use")
    with make_pair(adapters=loads) as pair:
        for one in loads.values():
            load(one, asked)
        yield pair, loads, asked
    for one in loads.values():
        one.close(time.monotonic() + PATIENCE_S)


def test_kv_of_an_adapter_that_decode_loads_again_while_it_comes_is_not_called_received(tmp_path: Path) -> None:
    with pair_with_adapter(tmp_path) as (pair, loads, asked):
        push(pair, "a", asked)
        pair.require_received("a")
        announce(pair, "b", asked)
        put(tmp_path, b"new")
        load(loads[Role.DECODE], asked)
        pair.forward(msgspec.structs.replace(pair.slice_of("b", [2], [2]), adapter=asked))
        pair.require_lost("b")
        push(pair, "c", asked)
        pair.require_lost("c")
        assert [lost.request_id for lost in pair.losses] == ["c"], "b was received and judged, c never came"
        load(loads[Role.PREFILL], asked)
        push(pair, "d", asked)
        pair.require_received("d")


def test_a_request_whose_first_step_reads_other_files_is_named_to_vllm_by_its_block(tmp_path: Path) -> None:
    with pair_with_adapter(tmp_path) as (pair, loads, asked):
        for name in ("a", "b"):
            push(pair, name, asked)
            pair.require_received(name)
        assert foreign_blocks(pair, "a", block=3) == set(), "its step had the adapter as it was"
        put(tmp_path, b"new")
        load(loads[Role.DECODE], asked)
        assert foreign_blocks(pair, "b", block=4) == {4}
        assert foreign_blocks(pair, "b", block=4) == set(), "once"


def foreign_blocks(pair: Pair, name: str, *, block: int) -> set[int]:
    """What is named after the step that is the request's first."""
    first = FirstStep(RequestId(name), TransferId(name), block)
    pair.decode.worker.begin_step(DecodeStep(first_steps=(first,)))
    return pair.decode.worker.foreign_blocks()


def announce(pair: Pair, name: str, asked: AdapterRequest) -> None:
    """The receiver knows of the request, and of the content of its adapter."""
    pair.decode.worker.begin_step(
        DecodeStep(expects=(msgspec.structs.replace(expect(name, 1, 120_000), adapter=asked),))
    )
    assert until(lambda: pair.decode.worker._reception.num_waiting == 1)


def push(pair: Pair, name: str, asked: AdapterRequest) -> None:
    announce(pair, name, asked)
    pair.forward(msgspec.structs.replace(pair.slice_of(name, [1], [1]), adapter=asked))
