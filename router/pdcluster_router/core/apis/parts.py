"""A request for several sequences, taken apart: one body for each of them, which any pair of engines can serve.

    {"prompt": ["a", "b"], "n": 2, "seed": 7, ...}
        part 0   {..., "prompt": ["a"], "n": 1, "seed": 7}       part 2   {..., "prompt": ["b"], "n": 1, "seed": 7}
        part 1   {..., "prompt": ["a"], "n": 1, "seed": 8}       part 3   {..., "prompt": ["b"], "n": 1, "seed": 8}

The number of a part is the ``index`` of its choice: vLLM 0.32 numbers choices by prompt, then by ``n``
(``entrypoints/openai/completion/serving.py``), and gives choice i of a prompt the seed ``seed + i``
(``v1/engine/parallel_sampling.py``).

Only a request whose keys are all listed here is taken apart. Decode serves all others alone: they have a key, or a
spelling of a number, that may mean something else for each sequence by itself. ``merge.py`` makes one answer of the
parts' answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from pdcluster_protocol.errors import NO_JSON
from pdcluster_router.core.apis.rewrite import ABSENT, PREFILLED_APART, ClientBody, is_neutral, parse_body

MAX_PARTS: Final = 64
"""The most parts of a request. Each is a request to the engines, and takes a slot and KV blocks on decode: 64 are a
quarter of the 256 sequences that vLLM runs at once where it is not told otherwise."""
MAX_REPEATED_BYTES: Final = 1 << 20
"""The most bytes that the parts of a request repeat in all: of its headers, and of a completion's body all but the
prompts. They count in no client's room, so they must be few. Parts of one prompt share their body, as those of a chat
do."""

_SAMPLING: Final = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "length_penalty",
    "logit_bias", "logprob_token_ids", "logprobs", "max_tokens", "min_p", "min_tokens", "presence_penalty",
    "repetition_detection", "repetition_penalty", "response_format", "seed", "stop", "stop_token_ids",
    "structured_outputs", "temperature", "thinking_token_budget", "top_k", "top_p", "vllm_xargs",
)  # fmt: skip
_SHOWN: Final = (
    "mm_payload", "return_mm_kwargs", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids",
    "routed_experts_prompt_start", "skip_special_tokens", "spaces_between_special_tokens", "stream", "stream_interval",
    "stream_options",
)  # fmt: skip
_ASKED: Final = (
    "add_special_tokens", "cache_salt", "model", "n", "priority", "prompt_cache_key", "request_id", "session_id",
    "truncate_prompt_tokens", "truncation_side", "user",
)  # fmt: skip
_ANY: Final = (*_SAMPLING, *_SHOWN, *_ASKED, *(key for key in PREFILLED_APART if key != "n"))
_OF_CHAT: Final = (
    "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message", "documents",
    "include_reasoning", "max_completion_tokens", "media_io_kwargs", "messages", "mm_processor_kwargs",
    "parallel_tool_calls", "reasoning_effort", "return_prompt_text", "tool_choice", "tools", "top_logprobs",
)  # fmt: skip
COMPLETION_KEYS: Final = frozenset((*_ANY, "prompt", "suffix"))
CHAT_KEYS: Final = frozenset((*_ANY, *_OF_CHAT))
"""A body is taken apart only if all its keys are in this set, or in ``COMPLETION_KEYS`` for completions. Its keys of
``PREFILLED_APART``, except ``n``, must have values that ask for nothing."""


class PartBody(ClientBody, frozen=True):
    """One sequence of a client's request. Parts of one prompt share its bytes."""

    _ours: tuple[bytes, ...]
    """Keys that replace the client's, for decode and prefill."""

    @property
    def needs_local_prefill(self) -> bool:
        """False: a part is one sequence, and asks for no facts of its prompt."""
        return False

    def _followed_by(self, ours: list[bytes]) -> tuple[bytes | memoryview, bytes]:
        return super()._followed_by([*self._ours, *ours])


@dataclass(frozen=True, slots=True)
class Division:
    """A request, taken apart."""

    bodies: tuple[PartBody, ...]
    """The parts, each at the index of its choice."""
    num_choices: int
    """Choices of each prompt."""


def taken_apart(body: ClientBody, *, is_chat: bool, num_header_bytes: int) -> Division | None:
    """The parts of ``body``; None: decode has to serve it as a whole. Costs a second scan of the body, and a third scan
    of its prompts.

    Call it only for a body that ``needs_local_prefill``. ``num_header_bytes``: of the client's headers.
    """
    if body.wants_decode_alone:
        return None
    said = _said_by(body, _CHAT if is_chat else _COMPLETION)
    num_choices = _num_choices(said) if _is_known(said) else 0
    prompts = [] if is_chat else _prompts_in(said.get("prompt", ABSENT))
    if prompts is None or not 1 < (num_parts := num_choices * max(1, len(prompts))) <= MAX_PARTS:
        return None
    begin = _all_but_prompts(said) if prompts else b""
    if num_parts * num_header_bytes + len(prompts) * len(begin) > MAX_REPEATED_BYTES:
        return None
    bodies = [one.for_model(body.engines_name) for one in _one_prompt_each(begin, prompts)] if prompts else [body]
    return Division(tuple(_choices(bodies, said, num_choices)), num_choices)


def _said_by(body: ClientBody, keys: msgspec.json.Decoder[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """The body's keys and values. Empty: the body has a key that is not among ``keys``; the scan stops at it."""
    try:
        values = msgspec.structs.asdict(keys.decode(body.text))
    except NO_JSON:
        return {}
    return {key: raw for key, raw in values.items() if raw is not ABSENT}


def _is_known(said: dict[str, msgspec.Raw]) -> bool:
    """Whether no key of ``_APART`` asks for anything, and ``stream`` is true, false, null or absent."""
    is_plain = all(is_neutral(said.get(key, ABSENT), values) for key, values in _APART.items())
    return is_plain and is_neutral(said.get("stream", ABSENT), (b"true", b"false"))


def _num_choices(said: dict[str, msgspec.Raw]) -> int:
    """How many choices of each prompt. 0: vLLM may refuse ``n``, ``seed`` or ``temperature``, so it gets the whole."""
    n = said.get("n", ABSENT)
    if is_neutral(n, (b"1",)):
        return 1
    has_seed = not is_neutral(said.get("seed", ABSENT), ())
    if has_seed and not _SEED.fullmatch(said["seed"]):
        return 0
    return int(bytes(n)) if _COUNT.fullmatch(n) and _draws(said.get("temperature", ABSENT)) else 0


def _draws(temperature: msgspec.Raw) -> bool:
    """Whether vLLM draws tokens at random. At temperature 0 it takes the likeliest ones, and refuses several choices.

    Without the client's temperature the model's default counts, which is taken to be above 0.
    """
    if is_neutral(temperature, ()):
        return True
    return bool(_NUMBER.fullmatch(temperature)) and float(bytes(temperature)) > 0


def _prompts_in(prompt: msgspec.Raw) -> list[msgspec.Raw] | None:
    """The prompts of a list; empty: it is one prompt. None: it is neither a list of texts nor one of token lists."""
    if _ONE.match(prompt):
        return []
    try:
        values = msgspec.structs.astuple(_LIST.decode(prompt))
    except NO_JSON:
        return None  # There are more than ``MAX_PARTS``, or it is no list.
    prompts = [value for value in values if value is not ABSENT]
    is_list = any(all(map(kind.match, prompts)) for kind in (_TEXT, _TOKENS))
    return prompts if prompts and is_list else None


def _all_but_prompts(said: dict[str, msgspec.Raw]) -> bytes:
    """The begin of the body of each part, up to its prompt."""
    kept = [b'"%b":%b,' % (key.encode(), bytes(raw)) for key, raw in said.items() if key not in ("prompt", "n")]
    return b"{%b" % b"".join(kept)


def _one_prompt_each(begin: bytes, prompts: list[msgspec.Raw]) -> list[ClientBody]:
    """A body for each prompt, as a list of one: vLLM then reads the prompt as it reads the list of all."""
    return [parse_body(b'%b"prompt":[%b]}' % (begin, bytes(prompt))) for prompt in prompts]


def _choices(bodies: list[ClientBody], said: dict[str, msgspec.Raw], num_choices: int) -> Iterator[PartBody]:
    seed = said.get("seed", ABSENT)
    for body in bodies:
        for number in range(num_choices):
            ours = [b'"n":1'] if num_choices > 1 else []
            if number and not is_neutral(seed, ()):
                ours.append(b'"seed":%d' % (int(bytes(seed)) + number))
            yield part_of(body, tuple(ours))


def part_of(body: ClientBody, ours: tuple[bytes, ...]) -> PartBody:
    """``body`` as a part, with ``ours`` in place of the client's keys of these names."""
    said, num_tokens = body._said, body.estimated_prompt_tokens
    facts = (body.is_stream, num_tokens, body.model_said, body.engines_name)
    return PartBody(body._raw, body._begin, body._end, said, *facts, ours)


def _decoder_of(names: Iterable[str], *, is_list: bool = False) -> msgspec.json.Decoder[msgspec.Struct]:
    """A decoder that gives up at the first key, or the first element, for which there is no name."""
    fields = [(name, msgspec.Raw, ABSENT) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Named", fields, array_like=is_list, forbid_unknown_fields=True))


_APART: Final = {key: values if key != "best_of" else () for key, values in PREFILLED_APART.items() if key != "n"}
"""The keys, besides ``n``, that must not ask for anything, and their values that do not. ``best_of`` has no such value:
a vLLM that knows it refuses a ``best_of`` of 1 beside a larger ``n``."""
_COMPLETION: Final = _decoder_of(COMPLETION_KEYS)
_CHAT: Final = _decoder_of(CHAT_KEYS)
_LIST: Final = _decoder_of([f"prompt_{number}" for number in range(MAX_PARTS)], is_list=True)
_ONE: Final = re.compile(rb'"|\[\s{0,99}+[0-9]')
_TEXT: Final = re.compile(rb'"')
_TOKENS: Final = re.compile(rb"\[\s{0,99}+[0-9][0-9,\s]*+\]\Z")
_COUNT: Final = re.compile(rb"[1-9][0-9]{0,3}+")
_SEED: Final = re.compile(rb"[0-9]{1,18}+")
"""18 digits: vLLM takes the seed also when the number of a choice is added. No sign: vLLM takes -1 for no seed, and -2
plus the number of a choice may be -1."""
_NUMBER: Final = re.compile(rb"[0-9]{1,18}+(?:\.[0-9]{1,99}+)?+(?:[eE][+-]?[0-9]{1,3}+)?+")
