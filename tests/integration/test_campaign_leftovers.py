"""What a campaign counts on each rank at its end: each kind is seen while it is there, and none afterwards."""

from __future__ import annotations

from campaign.leftovers import of_decode, of_prefill
from fakes.transports import Late, Wire, wrap_transports
from integration.ranks import Pair, make_pair


def some(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def require_nothing(pair: Pair) -> None:
    assert pair.step_until(lambda: not some(of_prefill(pair.prefill.worker)) | some(of_decode(pair.decode.worker)))


def test_a_push_is_seen_on_both_ranks_until_it_has_ended() -> None:
    wire = Wire(is_holding=True)
    with make_pair() as pair:
        require_nothing(pair)
        wrap_transports(pair.prefill.worker, lambda inner: Late(inner, wire))
        pair.compare("a", [1, 2], [5, 6])
        assert pair.step_until(lambda: wire.num_submitted > 0 and of_prefill(pair.prefill.worker)["writes"] > 0)
        held = some(of_prefill(pair.prefill.worker))
        assert held.pop("writes") > 0
        assert held == {"requests whose blocks are held": 1, "requests known": 1, "pushes": 1}
        assert some(of_decode(pair.decode.worker)) == {
            "reservations": 1, "requests known": 2, "contents to compare": 1,
        }  # fmt: skip
        wire.is_holding = False
        pair.require_received("a")
        assert some(of_prefill(pair.prefill.worker))["requests known"] == 1  # vLLM has not ended it yet
        pair.step(finished=["a"])
        require_nothing(pair)


def test_a_push_without_a_reservation_and_a_result_that_vllm_does_not_take_are_seen() -> None:
    with make_pair() as pair:
        pair.forward(pair.slice_of("a", [1], [5]))
        parked, untold = "prefill ranks that wait for a reservation", "results not told"
        assert pair.step_until(lambda: some(of_decode(pair.decode.worker)) == {parked: 1})
        pair.expect("a", 1)
        pair.require_received("a")
        pair.step(finished=["a"])
        require_nothing(pair)
        pair.decode.worker._losses.append(object())  # type: ignore[arg-type]  # any
        assert some(of_decode(pair.decode.worker)) == {untold: 1}
        pair.decode.worker._losses.clear()
