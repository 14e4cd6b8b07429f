"""The estimate of a prompt finds each long text, wherever quotes lie, as a plain look at every text does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_router.core.apis.estimate import BYTES_PER_TOKEN, LONG_BYTES, MEDIA_TOKENS, estimate_prompt_tokens

URL = b"data:image/png;base64,"
LENGTHS = st.integers(0, 40) | st.integers(LONG_BYTES - 3, LONG_BYTES + 3) | st.integers(0, 3 * LONG_BYTES)
TEXTS = st.lists(st.tuples(LENGTHS, st.booleans()), max_size=12)


def text_of(num_bytes: int, is_media: bool) -> bytes:
    return (URL if is_media else b"").ljust(num_bytes, b"A")


@given(TEXTS)
def test_media_are_found_as_by_a_look_at_every_text(drawn: list[tuple[int, bool]]) -> None:
    texts = [text_of(*one) for one in drawn]
    body = b'"'.join([b"", *texts, b""])
    media = [text for text in texts if text.startswith(URL) and len(text) > LONG_BYTES]
    num_text_bytes = len(body) - sum(map(len, media))
    assert estimate_prompt_tokens(body) == (num_text_bytes // BYTES_PER_TOKEN + len(media) * MEDIA_TOKENS or 1)


@given(st.binary(max_size=60), st.integers(1, 400))
def test_any_bytes_have_an_estimate(unit: bytes, number: int) -> None:
    assert 1 <= estimate_prompt_tokens(unit * number) <= max(1, len(unit * number) // BYTES_PER_TOKEN)
