"""The versions of vLLM that are proven on engines, and with which tests of this repository."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_INTEGRATION: Final = "tests/integration/"
_MODELS: Final = f"{_INTEGRATION}test_support_models.py::test_a_pool_answers_like_a_single_engine"


@dataclass(frozen=True, slots=True)
class Version:
    """One version, as the package index has it: a CPU build. ``torch``: the release that it pins a CPU build of."""

    vllm: str
    torch: str
    models: tuple[str, ...]
    """Names of ``zoo.cases`` that its CPU kernels run and that are not refused on it."""

    @property
    def minor(self) -> str:
        return ".".join(self.vllm.split(".")[:2])

    @property
    def tests(self) -> tuple[str, ...]:
        """What runs on its engines, as pytest takes it."""
        return (*_EVERYWHERE, *(f"{_MODELS}[{name}]" for name in self.models))


_EVERYWHERE: Final = (
    f"{_INTEGRATION}test_exact.py::test_200_prompts_at_concurrency_16_answer_like_a_single_engine[prefix caching]",
    f"{_INTEGRATION}test_exact.py::test_two_prefill_and_two_decode_engines_answer_like_one",
    f"{_INTEGRATION}test_exact.py::test_every_byte_of_every_layers_blocks_on_decode_equals_prefills",
    f"{_INTEGRATION}test_support_tp.py::test_tp_sizes_that_do_not_divide_each_other_answer_like_a_single_engine",
    f"{_INTEGRATION}test_failures.py",
    f"{_INTEGRATION}test_retry.py",
)
SHORT: Final = (
    f"{_INTEGRATION}test_exact.py::test_every_byte_of_every_layers_blocks_on_decode_equals_prefills[192]",
    f"{_INTEGRATION}test_failures.py::test_with_policy_recompute_decode_answers_by_itself_when_prefill_dies",
)
"""What a quick look runs: bytes, and the way in which a failure is told."""
_LLAMAS: Final = ("fp8 2 to 1", "pipeline 2 to tp 2")
_DENSE: Final = ("mistral 2 to 1", *_LLAMAS)
_GUESSES: Final = ("ngram", "draft model")
"""0.23's and 0.30's rejection samplers end their own CPU engines: a kernel gets an argument that it does not take, or
a helper of Triton's asks a CPU kernel for its parameters."""
_MORE: Final = (*_DENSE, "gemma3", "mla 1 to 2", "delta net 2 to 2")
"""Their CPU kernels of Mamba2 take no float32."""

VERSIONS: Final = (
    Version("0.23.0", "2.11.0", _DENSE),
    Version("0.26.0", "2.11.0", ("mistral", *_LLAMAS, *_GUESSES)),  # its kernel ends a plain Mistral engine of TP 2 too
    Version("0.29.0", "2.13.0", (*_DENSE, *_GUESSES)),
    Version("0.30.0", "2.13.0", _MORE),
    Version("0.31.0", "2.13.0", (*_MORE, *_GUESSES)),
)
NEWEST_ON_CPU: Final = "0.32.0"
"""Of every other test."""
