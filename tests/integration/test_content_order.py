"""Content is compared beside the forward pass: a step that is under way holds no digest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from fakes.async_device import AsyncRuntime, async_device
from fakes.late_transport import LateTransport, Wire
from integration.ranks import Cache, Pair, Shape, engine_facts, fingerprint_of
from integration.slow_prefill import SETTINGS
from patience import until
from pdcluster_connector.assembly import make_decode_rank, make_prefill_rank
from pdcluster_connector.engine_facts import Memory
from pdcluster_connector.transport.sessions import Sessions
from pdcluster_protocol.labels import Role


def memory_of(cache: Cache, runtime: AsyncRuntime) -> Memory:
    """The cache, whose tensors are the device's."""
    memory = cache.memory(fingerprint_of(cache.shape))
    return replace(memory, views=tuple(map(runtime.tensor, memory.views)))


@contextmanager
def pair_on_devices() -> Iterator[tuple[Pair, dict[str, AsyncRuntime], Wire]]:
    """Both ranks on devices; prefill's bytes wait on the wire until the test lets them."""
    shape, wire = Shape(), Wire(is_holding=True)
    source, target = Cache(shape), Cache(shape)
    source.fill(1)
    with ExitStack() as stack:
        ours, our_runtime = stack.enter_context(async_device())
        theirs, their_runtime = stack.enter_context(async_device())
        facts = [engine_facts(role, shape, SETTINGS) for role in (Role.DECODE, Role.PREFILL)]
        decode = make_decode_rank(facts[0], memory_of(target, their_runtime), device=theirs)
        stack.callback(decode.close)
        prefill = make_prefill_rank(facts[1], memory_of(source, our_runtime), device=ours)
        stack.callback(prefill.close)
        sessions = Sessions(lambda: LateTransport(prefill.sessions.open(), wire))
        stack.callback(sessions.close)
        prefill.worker._parts = replace(prefill.worker._parts, sessions=sessions)
        stack.callback(our_runtime.release)
        stack.callback(their_runtime.release)
        yield Pair(prefill, decode, source, target), {"prefill": our_runtime, "decode": their_runtime}, wire


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_digest_is_read_while_the_forward_pass_is_at_another_step(side: str) -> None:
    with pair_on_devices() as (pair, runtimes, wire):
        pair.compare("a", [1], [5], deadline_ms=120_000)
        assert until(lambda: wire.num_submitted == len(pair.source.shape.layer_names()))
        runtimes[side].default.hold()
        runtimes[side].default.give(lambda: None)
        wire.is_holding = False
        assert pair.step_until(lambda: "a" in pair.ended)
        assert pair.ended["a"]
        assert runtimes[side].default.num_done < runtimes[side].default.num_given
