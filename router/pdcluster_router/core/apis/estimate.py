"""About how many tokens a request's prompt has, from the bytes of its body: nothing is parsed or tokenized here.

Each image or sound counts as ``MEDIA_TOKENS``: the length of its base64 is the size of a file, and does not tell how
many tokens vLLM makes of it. The base64 is one long text without a quote, so only texts of more than ``LONG_BYTES`` are
looked at. The search goes from quote to quote in steps of that size: any body costs two searches for a quote in each
4,000 bytes. A search for the words that mark media would cost up to 5 ns a byte in a body of the words' letters: 43 ms
for 8 MiB of ``e``. The exact number in decode's reservation replaces the estimate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

BYTES_PER_TOKEN: Final = 4
MEDIA_TOKENS: Final = 1000
"""Tokens of one image or sound: about as many as vLLM's vision models make of a picture of a megapixel."""
LONG_BYTES: Final = BYTES_PER_TOKEN * MEDIA_TOKENS
"""Media of up to so many bytes count as text, so for ``MEDIA_TOKENS`` at most."""

_DATA_URL: Final = re.compile(rb'"data:[^",]{0,100};base64,')
"""How an image, sound or video of OpenAI's API begins: ``"data:image/png;base64,...``."""
_DATA: Final = re.compile(rb'"data"\s*+:\s*+"\Z')
"""The key of an ``input_audio`` of OpenAI's API, or of an image of Anthropic's: ``{"type": "base64", "media_type":
"image/png", "data": "..."}``."""
_MEDIA: Final = re.compile(rb'"(?:input_audio|media_type)"')
_NEAR_BYTES: Final = 256
"""How many bytes before and behind a long text are searched for the words of ``_DATA`` and ``_MEDIA``."""


def tokens_of_text(num_bytes: int) -> int:
    """The tokens of a body without media, at least 1. A body with a ``prompt`` has no media."""
    return num_bytes // BYTES_PER_TOKEN or 1


def estimate_prompt_tokens(body: bytes | bytearray) -> int:
    """The tokens of any body, at least 1."""
    num_text_bytes, num_media = len(body), 0
    for begin, end in _long_texts(body):
        if _is_media(body, begin, end):
            num_text_bytes -= end - begin
            num_media += 1
    return num_text_bytes // BYTES_PER_TOKEN + num_media * MEDIA_TOKENS or 1


def _long_texts(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Texts of more than ``LONG_BYTES`` without a quote: the index of the first byte, and of the quote behind the
    last."""
    quote = body.find(b'"')
    while 0 <= quote < len(body) - LONG_BYTES:
        last = body.rfind(b'"', quote + 1, quote + 2 + LONG_BYTES)
        if last < 0:
            last = body.find(b'"', quote + 2 + LONG_BYTES)
            if last < 0:
                return
            yield quote + 1, last
        quote = last


def _is_media(body: bytes | bytearray, begin: int, end: int) -> bool:
    if _DATA_URL.match(body, begin - 1):
        return True
    before = body[max(0, begin - _NEAR_BYTES) : begin]
    if not _DATA.search(before):
        return False
    return bool(_MEDIA.search(before) or _MEDIA.search(body, end, end + _NEAR_BYTES))
