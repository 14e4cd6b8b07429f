"""What a fake engine says for a request to a pooling model, as vLLM 0.32 does (``entrypoints/pooling``).

``tests/integration/test_pooling_engine.py`` has a real engine's.
"""

from __future__ import annotations

import json
from typing import Any

from fakes.reservations import PROMPT_TOKENS
from fakes.words import OpenAIWords
from pdcluster_router.core.apis.pooling import POOLING_PATHS, SCORING_PATHS

PATHS = tuple(path.decode() for path in (*POOLING_PATHS, *SCORING_PATHS))
_USAGE = {"prompt_tokens": PROMPT_TOKENS, "total_tokens": PROMPT_TOKENS, "completion_tokens": 0}


class PoolingWords(OpenAIWords):
    """For one request. Each answer has a number for each text of ``input``, and ``padding``."""

    def whole(self) -> bytes:
        texts = self.body.get("input", ["one"])
        data: list[dict[str, Any]] = [
            {"index": index, "object": "embedding", "embedding": [0.5, -0.25]} for index, _ in enumerate(texts)
        ]
        said = {"id": f"embd-{self.answer_id}", "object": "list", "created": 1, "model": self.body.get("model")}
        return json.dumps({**said, "data": data, "padding": self.padding, "usage": _USAGE}).encode()
