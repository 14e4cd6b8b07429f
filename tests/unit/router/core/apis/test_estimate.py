"""The estimate of a prompt: text by its bytes, media by the piece."""

from __future__ import annotations

import json

import pytest

from pdcluster_router.core.apis.estimate import LONG_BYTES, MEDIA_TOKENS, estimate_prompt_tokens, tokens_of_text

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "A" * 300_000, "format": "wav"}}
AUDIO_LAST = {"type": "input_audio", "input_audio": {"format": "wav", "data": "A" * 300_000}}
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 300_000}}
SOURCE_FIRST = {"type": "image", "source": {"data": "A" * 300_000, "type": "base64", "media_type": "image/png"}}


def body_of(*parts: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


@pytest.mark.parametrize(("body", "tokens"), [(b"", 1), (b"{}", 1), (b"x" * 4000, 1000)])
def test_text_counts_by_its_bytes(body: bytes, tokens: int) -> None:
    assert estimate_prompt_tokens(body) == tokens


@pytest.mark.parametrize("part", [IMAGE, AUDIO, AUDIO_LAST, SOURCE, SOURCE_FIRST])
@pytest.mark.parametrize("number", [1, 3])
def test_an_image_or_a_sound_counts_as_one_whatever_its_bytes(part: object, number: int) -> None:
    tokens = estimate_prompt_tokens(body_of(*[part] * number))
    assert number * MEDIA_TOKENS <= tokens <= number * (MEDIA_TOKENS + 50)


def test_the_text_beside_an_image_counts() -> None:
    text = {"type": "text", "text": "y" * 40_000}
    assert estimate_prompt_tokens(body_of(text, IMAGE, text)) >= 20_000 + MEDIA_TOKENS


def test_a_data_url_that_does_not_end_is_text() -> None:
    assert estimate_prompt_tokens(b";base64," + b"A" * 4000) >= 1000


@pytest.mark.parametrize("num_bytes", [LONG_BYTES, LONG_BYTES + 1])
def test_a_piece_that_is_shorter_than_what_media_count_for_counts_by_its_bytes(num_bytes: int) -> None:
    url = "data:image/png;base64,"
    body = body_of({"image_url": {"url": url + "A" * (num_bytes - len(url))}})
    num_text = len(body) - (num_bytes if num_bytes > LONG_BYTES else 0)
    assert estimate_prompt_tokens(body) == num_text // 4 + (MEDIA_TOKENS if num_bytes > LONG_BYTES else 0)


@pytest.mark.parametrize(
    "text",
    ["x" * 40_000, "see data:image/png;base64," + "A" * 40_000, "data:,base64" + "A" * 40_000, "input_audio" * 4000],
)
def test_a_long_text_that_is_no_media_counts_by_its_bytes(text: str) -> None:
    body = body_of({"type": "text", "text": text}, {"data": text}, IMAGE | {"type": "é"})
    assert 20_000 + MEDIA_TOKENS <= estimate_prompt_tokens(body) <= 22_000 + 2 * MEDIA_TOKENS


@pytest.mark.parametrize(("num_bytes", "tokens"), [(0, 1), (3, 1), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_text_has_whole_tokens_and_one_at_least(num_bytes: int, tokens: int) -> None:
    assert str(tokens_of_text(num_bytes)) == str(tokens)
