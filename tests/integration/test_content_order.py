"""Content is compared beside the forward pass: a step that is under way delays no content sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest

from fakes.async_device import AsyncRuntime, async_device
from fakes.transports import Late, Wire, wrap_transports
from integration.ranks import make_pair
from integration.slow_prefill import SETTINGS
from patience import until
from pdcluster_connector.engine_facts import Memory
from pdcluster_protocol.labels import Role


def on_device(runtime: AsyncRuntime) -> Callable[[Memory], Memory]:
    """The memory's tensors are the device's."""
    return lambda memory: replace(memory, views=tuple(map(runtime.tensor, memory.views)))


@pytest.mark.parametrize("side", Role)
def test_sums_are_read_while_the_forward_pass_is_at_another_step(side: Role) -> None:
    """Both ranks are on devices; prefill's bytes wait on the wire until the test lets them."""
    with ExitStack() as stack:
        made = {role: stack.enter_context(async_device()) for role in Role}
        changes = {role: on_device(runtime) for role, (_, runtime) in made.items()}
        devices = {role: device for role, (device, _) in made.items()}
        pair = stack.enter_context(make_pair(settings=SETTINGS, changes=changes, devices=devices))
        for _, runtime in made.values():
            stack.callback(runtime.release)
        wire, stream = Wire(is_holding=True), made[side][1].default
        wrap_transports(pair.prefill.worker, lambda inner: Late(inner, wire))
        pair.compare("a", [1], [5], deadline_ms=120_000)
        assert until(lambda: wire.num_submitted == len(pair.source.shape.layer_names()))
        stream.hold()
        stream.give(lambda: None)
        given = stream.num_given
        wire.is_holding = False
        pair.require_received("a")
        assert stream.num_done < stream.num_given
        assert stream.num_given == given, "the sums gave work to the forward pass's stream"
