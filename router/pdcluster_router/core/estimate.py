"""About how many tokens a request's prompt has, from the bytes of its body: nothing is parsed or tokenized here.

Images and sounds count by the piece: their base64 says how large a file is, not how many tokens it becomes. Decode's
reservation brings the exact number, and replaces this one.
"""

from __future__ import annotations

from typing import Final

BYTES_PER_TOKEN: Final = 4
MEDIA_TOKENS: Final = 1000
"""One image or sound: what vLLM's vision models make of a picture of about a megapixel."""
MAX_MEDIA: Final = 256
"""Pieces that are looked for in one body; what follows counts as text. Bounds the work on a body made to cost much."""

_DATA_URL: Final = b";base64,"
_AUDIO: Final = b'"input_audio"'
_SOURCE: Final = b'"media_type"'
"""An image of Anthropic's API: ``{"type": "base64", "media_type": "image/png", "data": "..."}``."""
_DATA: Final = b'"data"'
_MAX_GAP_BYTES: Final = 256


def tokens_of_text(num_bytes: int) -> int:
    """At least 1. For a body that has no media: one with a ``prompt`` has none."""
    return num_bytes // BYTES_PER_TOKEN or 1


def estimate_prompt_tokens(body: bytes | bytearray) -> int:
    """At least 1. Costs one search through the body, and one more for each kind of media in it."""
    num_media, num_media_bytes = 0, 0
    for marker in (_DATA_URL, _AUDIO, _SOURCE):
        position = body.find(marker)
        while position >= 0 and num_media < MAX_MEDIA:
            start = position + len(marker) if marker is _DATA_URL else _data_start(body, position + len(marker))
            end = max(start, body.find(b'"', start))
            num_media += 1
            num_media_bytes += end - start
            position = body.find(marker, end)
    return (len(body) - num_media_bytes) // BYTES_PER_TOKEN + num_media * MEDIA_TOKENS or 1


def _data_start(body: bytes | bytearray, start: int) -> int:
    """Where the base64 begins; ``start`` where it is not found soon."""
    found = body.find(_DATA, start, start + _MAX_GAP_BYTES)
    if found < 0:
        return start
    quote = body.find(b'"', found + len(_DATA), found + len(_DATA) + _MAX_GAP_BYTES)
    return start if quote < 0 else quote + 1
