"""The estimate of a prompt: text by its bytes, media by the piece."""

from __future__ import annotations

import json

import pytest

from pdcluster_router.core.estimate import MAX_MEDIA, MEDIA_TOKENS, estimate_prompt_tokens, tokens_of_text

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 300_000}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "A" * 300_000, "format": "wav"}}
AUDIO_LAST = {"type": "input_audio", "input_audio": {"format": "wav", "data": "A" * 300_000}}


def body_of(*parts: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


@pytest.mark.parametrize(("body", "tokens"), [(b"", 1), (b"{}", 1), (b"x" * 4000, 1000)])
def test_text_counts_by_its_bytes(body: bytes, tokens: int) -> None:
    assert estimate_prompt_tokens(body) == tokens


@pytest.mark.parametrize("part", [IMAGE, AUDIO, AUDIO_LAST])
@pytest.mark.parametrize("number", [1, 3])
def test_an_image_or_a_sound_counts_as_one_whatever_its_bytes(part: object, number: int) -> None:
    tokens = estimate_prompt_tokens(body_of(*[part] * number))
    assert number * MEDIA_TOKENS <= tokens <= number * (MEDIA_TOKENS + 50)


def test_the_text_beside_an_image_counts() -> None:
    text = {"type": "text", "text": "y" * 40_000}
    assert estimate_prompt_tokens(body_of(text, IMAGE, text)) >= 20_000 + MEDIA_TOKENS


def test_a_data_url_that_does_not_end_is_text() -> None:
    assert estimate_prompt_tokens(b";base64," + b"A" * 4000) >= 1000


def test_more_pieces_than_are_looked_for_count_as_text() -> None:
    body = b'";base64,"' * 100_000
    assert estimate_prompt_tokens(body) == (len(body) // 4) + MAX_MEDIA * MEDIA_TOKENS


@pytest.mark.parametrize(("num_bytes", "tokens"), [(0, 1), (3, 1), (4, 1), (7, 1), (8, 2), (11, 2)])
def test_text_has_whole_tokens_and_one_at_least(num_bytes: int, tokens: int) -> None:
    assert str(tokens_of_text(num_bytes)) == str(tokens)
