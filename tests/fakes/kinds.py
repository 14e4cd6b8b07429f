"""The words of a fake engine for each API that has words of its own, by path."""

from __future__ import annotations

from collections.abc import Mapping

from fakes.messages import MESSAGES, MessagesWords
from fakes.pooling import PATHS, PoolingWords
from fakes.responses import RESPONSES, ResponsesWords
from fakes.words import OpenAIWords

KINDS: Mapping[str, type[OpenAIWords]] = {
    **dict.fromkeys(PATHS, PoolingWords),
    MESSAGES: MessagesWords,
    RESPONSES: ResponsesWords,
}
