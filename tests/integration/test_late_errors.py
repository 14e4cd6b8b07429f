"""A device tells one thread of a kernel that it has not done: every push that may have its bytes is lost, and only now.

``tests/property/test_late_errors.py`` draws who is told and when; these are the ways that are hard to draw.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import msgspec

from fakes.late_errors import Kind
from fakes.transports import FirstNeverEnds, wrap_transports
from integration.late_rig import Prompt, late_rig
from integration.slow_prefill import SETTINGS, slow_prefill
from integration.test_content_order import Gate, gated
from patience import PATIENCE_S, until
from pdcluster_connector.ending import END_S
from pdcluster_protocol.labels import Role

COMPARED: Final = Prompt("compared", 0, (1, 2), (7, 8), is_compared=True)
WARM: Final = Prompt("warm", 1, (9,), (9,), is_compared=False)
SPOILT: Final = Prompt("spoilt", 1, (4, 5), (3, 5), is_compared=False)
OTHER: Final = Prompt("other", 0, (7,), (20,), is_compared=False)
AFTER: Final = Prompt("after", 1, (10,), (30,), is_compared=False)
WHOLE: Final = slice(0, None)


def test_a_kernel_of_which_only_the_sums_of_another_push_are_told_gives_no_answer() -> None:
    gate = Gate()
    with late_rig(Role.PREFILL, gated(gate)) as rig:
        late = rig.runtime.late
        for prompt in (WARM, COMPARED, SPOILT, AFTER):
            rig.expect(prompt)
        rig.forward((WARM, WHOLE), (COMPARED, WHOLE))
        assert rig.require_true_end(WARM)
        assert gate.is_reached.wait(PATIENCE_S)
        late.fail(Kind.ONCE)

        def told() -> None:
            assert until(lambda: late.has_failed)
            gate.is_open.set()
            assert until(lambda: late.num_told == 1), "its sums ask for nothing"
            assert until(lambda: rig.device.num_faults == 1)  # 0033, Limits: it has run since it was told

        rig.forward((SPOILT, WHOLE), then=told)
        assert not rig.require_true_end(SPOILT)
        assert not rig.require_true_end(COMPARED)
        rig.forward((AFTER, WHOLE))
        assert rig.require_true_end(AFTER)
        rig.require_released(WARM, COMPARED, SPOILT, AFTER)


def test_a_kernel_of_which_only_a_new_lane_is_told_gives_no_answer() -> None:
    with late_rig(Role.PREFILL) as rig:
        late = rig.runtime.late
        for prompt in (WARM, SPOILT, OTHER, AFTER):
            rig.expect(prompt)
        rig.forward((WARM, WHOLE))
        assert rig.require_true_end(WARM)
        late.fail(Kind.ONCE, deaf=frozenset(threading.enumerate()))
        rig.forward((SPOILT, slice(0, 1)))
        rig.forward((OTHER, WHOLE))
        assert until(lambda: late.num_told == 1)
        assert until(lambda: rig.device.num_faults == 1)
        rig.forward((SPOILT, slice(1, None)))
        assert not rig.require_true_end(SPOILT)
        assert not rig.require_true_end(OTHER)
        rig.forward((AFTER, WHOLE))
        assert rig.require_true_end(AFTER)
        rig.require_released(WARM, SPOILT, OTHER, AFTER)


def test_a_write_to_a_silent_decode_rank_is_cut_though_prefills_device_is_broken() -> None:
    """Its events raise at each question; the push's own deadlines are looked at all the same."""
    with slow_prefill(msgspec.structs.replace(SETTINGS, hold_s=0.1)) as slow:
        wrap_transports(slow.pair.prefill.worker, FirstNeverEnds)
        slow.pair.expect("a", 1)
        slow.compute(slow.pair.slice_of("a", [1], [5]), [1])
        slow.forward.let(1)
        assert slow.pair.step_until(lambda: slow.arrived(0, 5))
        slow.runtime.late.fail(Kind.STAYS)
        slow.forward.let(1)
        slow.pair.require_lost("a")
        slow.pair.step(finished=["a"])
        assert slow.pair.step_until(lambda: "a" in slow.pair.released), "blocks are kept for ever"


def test_a_lane_that_had_nothing_under_way_costs_no_request_that_was_computed_after_the_error() -> None:
    """It looks for faults once in a second: until then it must not be taken for what comes next."""
    with late_rig(Role.PREFILL) as rig:
        late = rig.runtime.late
        for prompt in (WARM, OTHER, AFTER):
            rig.expect(prompt)
        rig.forward((WARM, WHOLE))
        assert rig.require_true_end(WARM)
        late.fail(Kind.ONCE)
        rig.forward((OTHER, WHOLE))
        assert until(lambda: late.num_told == 1)
        assert not rig.require_true_end(OTHER)
        rig.forward((AFTER, WHOLE))
        assert rig.require_true_end(AFTER)
        rig.require_released(WARM, OTHER, AFTER)


def test_a_lane_that_may_not_use_its_device_opens_no_session_with_it() -> None:
    """Each would be told again, by a thread of its own and with a traceback for each request."""
    prompts = [Prompt(f"lost {n}", 0, (1 + n,), (7 + n,), is_compared=False) for n in range(4)]
    with late_rig(Role.PREFILL) as rig:
        late = rig.runtime.late
        late.fail(Kind.STAYS)
        for prompt in prompts:
            rig.expect(prompt)
            rig.forward((prompt, WHOLE))
            assert not rig.require_true_end(prompt)
        rig.require_released(*prompts)
        rig.pairs[0].prefill.worker.close(time.monotonic() + END_S)
        assert late.num_told <= 1 + len(prompts), "asked again by a lane that had failed"
