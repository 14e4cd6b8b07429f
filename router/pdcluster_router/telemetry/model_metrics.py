"""The metrics of each model: their names, their texts, and for how many models there are series of their own."""

from __future__ import annotations

from typing import Final

from pdcluster_router.core.telemetry.histogram import histogram_text
from pdcluster_router.core.telemetry.model_numbers import ModelNumbers

MAX_MODELS: Final = 100
"""Models with series of their own, adapters among them. More than so many count together, without a name."""
_WELL: Final = "of an answer that ended well, by the model as engines list it."
_NO_NAME: Final = "The label is empty for unnamed and unlisted models, and for models after the first 100"
_FAMILIES: Final = (
    ("first_byte_seconds", "first_byte", f"Seconds from a request's arrival to the first body byte {_WELL} {_NO_NAME}"),
    ("prompt_tokens", "prompt_tokens", f"Tokens of the prompt {_WELL} {_NO_NAME}"),
    (
        "cached_tokens",
        "cached_tokens",
        f"Of the prompt's tokens those that decode had cached, {_WELL} {_NO_NAME}",
    ),
    ("answer_tokens", "answer_tokens", f"Tokens {_WELL} Of answers that tell usage. {_NO_NAME}"),
    (
        "token_seconds",
        "token_s",
        f"Seconds of each token after the first one, on average {_WELL} Of streams of one sequence that tell usage. "
        f"{_NO_NAME}",
    ),
    (
        "gap_seconds",
        "gaps",
        "Seconds between two pieces of a stream of one sequence as the router gets them, by the model as engines list "
        f"it. Counted as the later piece comes. {_NO_NAME}",
    ),
)
"""Name, attribute of ``ModelNumbers``, text."""


class ModelMetrics:
    """Owned by the router's metrics. Event loop only."""

    def __init__(self) -> None:
        self.known: dict[str, ModelNumbers] = {}
        """By model, as ``of`` has made them."""

    def of(self, model: str) -> ModelNumbers:
        """``model``: a name that engines list, or empty, so that no client can make series. Look in ``known``
        before."""
        name = model if model in self.known or len(self.known) < MAX_MODELS else ""
        numbers = self.known.get(name)
        if numbers is None:
            numbers = self.known[name] = ModelNumbers()
        return numbers

    def text(self, prefix: str) -> str:
        """All of them in Prometheus' text format. ``prefix``: of their names."""
        return "".join(
            histogram_text(
                prefix + name,
                about,
                (({"model": model}, getattr(numbers, attribute)) for model, numbers in self.known.items()),
            )
            for name, attribute, about in _FAMILIES
        )
