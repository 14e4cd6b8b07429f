"""A ClientHello gets the same verdict however it is cut, and only its claim decides."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from drawn import drawn
from fakes.hellos import CHANGE, claim, records
from pdcluster_router.core.clients.client_hello import MAX_HELLO_BYTES, BadHello, HelloWatch

claims = st.one_of(st.integers(0, 300), st.integers(0, (1 << 24) - 1))
messages = st.builds(lambda claimed, rest: claim(claimed) + rest, claims, st.binary(max_size=400))
streams = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda before, message, num, behind: before + records(message, num) + behind,
        st.sampled_from([b"", CHANGE, CHANGE * 2]),
        messages,
        st.integers(1, 500),
        st.binary(max_size=30),
    ),
)


def result_of(parts: list[bytes]) -> tuple[int, bool, str]:
    """The bytes that OpenSSL may have, whether the ClientHello is over, and why it is refused."""
    watch, num_passed = HelloWatch(), 0
    try:
        for part in parts:
            num = watch.feed(part)
            num_passed += num
            if num < len(part):
                break
    except BadHello as bad:
        return -1, watch.is_over, str(bad)
    return num_passed, watch.is_over, ""


@settings(max_examples=drawn(3000), deadline=None)
@given(streams, st.lists(st.integers(0, 1000), max_size=12))
@example(records(claim(1 << 17), 1), list(range(100)))
def test_where_it_is_cut_makes_no_difference(stream: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    cut = [stream[begin:end] for begin, end in pairwise(bounds)]
    assert result_of(cut) == result_of([stream]) == result_of([bytes([byte]) for byte in stream])


@settings(max_examples=drawn(3000), deadline=None)
@given(claims, st.binary(max_size=400), st.integers(1, 500))
def test_only_the_claim_decides(claimed: int, rest: bytes, record_bytes: int) -> None:
    rest = rest[:claimed]
    num_passed, is_over, problem = result_of([records(claim(claimed) + rest, record_bytes)])
    assert (num_passed < 0, bool(problem)) == (claimed > MAX_HELLO_BYTES,) * 2
    assert is_over == (len(rest) == claimed)
