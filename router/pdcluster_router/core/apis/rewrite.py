"""The client's body, and the two bodies made of it: decode's and prefill's.

Names the keys of an OpenAI request (vLLM 0.32 ``entrypoints/openai/*/protocol.py``) that the router reads or writes.
``parts.py`` lists the keys of a request that can be taken apart; ``messages.py`` has what is different in Anthropic's.

    client    {"prompt": "...", "n": 1, ...}
    decode    {"prompt": "...", "n": 1, ... ,"model":"...","kv_transfer_params":{...}}
    prefill   {"prompt": "...", "n": 1, ... ,"model":"...","stream":false,"max_tokens":1,...,"kv_transfer_params":{...}}

No objects are built of the body. A scan finds the keys below and skips all else. An engine gets the client's own bytes
with our keys before the last brace, a model only if the client's name is an alias. Our keys win: vLLM reads bodies with
Python's ``json``, which takes the last of equal keys, however each is escaped. msgspec does the scan, and takes nothing
that ``json`` would read otherwise.
Answers go back as they are, except those to parts (``merge.py``).
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Final, Self, TypeAlias, TypeVar

import msgspec

from pdcluster_protocol.errors import ProtocolError
from pdcluster_protocol.params import DecodeParams, Reservation
from pdcluster_router.core.apis.estimate import estimate_prompt_tokens, tokens_of_text

Bytes: TypeAlias = bytes | bytearray
Parts: TypeAlias = tuple[bytes | memoryview, bytes]
"""A body for an engine: the client's bytes up to its last brace, and the rest. Not joined: it may be large."""

_BOM: Final = b"\xef\xbb\xbf"
ABSENT: Final = msgspec.Raw(b"")
_MAX_DIGITS: Final = 18


class BadBody(ProtocolError):
    """The client's body cannot be a request. The message tells the client why."""


class Extra(msgspec.Struct, gc=False):
    """The keys that ``vllm_xargs`` must not hold: vLLM copies them to where the engine looks for transfer
    parameters."""

    kv_transfer_params: msgspec.Raw = ABSENT
    ec_transfer_params: msgspec.Raw = ABSENT


class Said(msgspec.Struct):
    """The client's value of each key that matters here. All others are skipped: nothing is built of them."""

    prompt: msgspec.Raw = ABSENT
    prompt_embeds: msgspec.Raw = ABSENT
    n: msgspec.Raw = ABSENT
    best_of: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    echo: msgspec.Raw = ABSENT
    prompt_logprobs: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    top_logprobs: msgspec.Raw = ABSENT
    logprob_token_ids: msgspec.Raw = ABSENT
    stream: msgspec.Raw = ABSENT
    stream_options: msgspec.Raw = ABSENT
    max_tokens: msgspec.Raw = ABSENT
    max_completion_tokens: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    ec_transfer_params: msgspec.Raw = ABSENT
    vllm_xargs: Extra | None = None
    """Has a type, so that it needs no second scan. vLLM takes an object or null."""
    messages: msgspec.Raw = ABSENT
    model: msgspec.Raw = ABSENT
    session_id: msgspec.Raw = ABSENT
    prompt_cache_key: msgspec.Raw = ABSENT


S = TypeVar("S", bound=Said)

PREFILLED_APART: Final[dict[str, tuple[bytes, ...]]] = {
    "n": (b"1",),
    "best_of": (b"1",),
    "use_beam_search": (b"false",),
    "echo": (b"false",),
    "prompt_logprobs": (),
    "prompt_embeds": (),
}
"""Keys that can ask for several sequences, or for facts of the prompt. A prefill engine computes the prompt only if
each of them is absent, null, or one of the values here, or if ``parts.py`` takes the request apart. vLLM takes other
spellings for the same number (``2.0``, ``"2"``, ``true``). For any other value decode computes the prompt itself, so
the answer is right."""

_TRUE_WORDS: Final = (b"true", b"1", b"on", b"t", b"y", b"yes")
TRUE_FORMS: Final = frozenset(
    (b"true", b"1", b"1.0", *(b'"%b"' % form for word in _TRUE_WORDS for form in (word, word.upper(), word.title())))
)
"""JSON values that vLLM takes for true (pydantic's lax mode), but for words like "tRUE" and numbers like 1e0."""
_ONE_TOKEN: Final = b'"stream":false,"max_tokens":1,"min_tokens":1,"n":1'
_NEUTRAL: Final[dict[str, bytes]] = {
    "best_of": b'"best_of":null',
    "use_beam_search": b'"use_beam_search":false',
    "echo": b'"echo":false',
    "prompt_logprobs": b'"prompt_logprobs":null',
    "logprobs": b'"logprobs":null',
    "top_logprobs": b'"top_logprobs":0',
    "logprob_token_ids": b'"logprob_token_ids":null',
    "stream_options": b'"stream_options":null',
    "max_completion_tokens": b'"max_completion_tokens":1',
    "ec_transfer_params": b'"ec_transfer_params":null',
}
"""Prefill gets these in place of the keys that the client gave: no client sees prefill's one token."""


class ClientBody(msgspec.Struct, frozen=True):
    """A request body, scanned once. ``_raw``: the client's bytes, an object from ``_begin`` to its brace at ``_end``.

    Shared by all steps of a request: nothing here changes it.
    """

    _raw: Bytes
    _begin: int
    _end: int
    _said: Said
    is_stream: bool
    estimated_prompt_tokens: int
    """About how many tokens there are to prefill, at least 1: ``core/apis/estimate.py``."""
    model_said: msgspec.Raw
    """The model's name as the client wrote it; empty where it wrote none. A field, because each request reads it."""
    engines_name: bytes
    """The model's name for engines, as JSON, if the client's is an alias; empty: engines get the client's own."""

    @property
    def num_bytes(self) -> int:
        return len(self._raw)

    @property
    def text(self) -> memoryview:
        """The object, as the client wrote it."""
        return memoryview(self._raw)[self._begin : self._end + 1]

    @property
    def needs_pair(self) -> bool:
        """Whether decode engines may serve it only beside a prefill engine of their revision."""
        return True

    @property
    def needs_local_prefill(self) -> bool:
        """Whether the request asks for several sequences, or for facts that only decode's own prefill yields.

        A request for several may be taken apart: ``core/apis/parts.py``. Decode prefills all others by itself.
        """
        said = _apart_in(self._said)
        is_plain = said == _SAYS_NOTHING or all(map(is_neutral, said, PREFILLED_APART.values()))
        return not (is_plain and _is_one_prompt(self._said.prompt))

    @property
    def wants_decode_alone(self) -> bool:
        """Whether the request asks for something besides several sequences: then it is not taken apart."""
        said = _but_n_in(self._said)
        return said != _SAYS_NOTHING[1:] and not all(map(is_neutral, said, _BUT_N))

    @property
    def max_answer_tokens(self) -> int | None:
        """The most tokens that the client allows an answer; None: it names no number."""
        given = self._said.max_completion_tokens
        of_both = count_in(given) if given is not ABSENT else 0
        return of_both or count_in(self._said.max_tokens) or None

    @property
    def messages(self) -> msgspec.Raw:
        """As the client wrote them; empty where it wrote none."""
        return self._said.messages

    @property
    def prompt(self) -> msgspec.Raw:
        """As the client wrote it; empty where it wrote none."""
        return self._said.prompt

    @property
    def model(self) -> str:
        """The model's name; empty where the client gave none."""
        return _name_in(self._said.model)

    @property
    def model_text(self) -> bytes:
        """The model's name as JSON text; empty where the client gave none."""
        return _text(self._said.model)

    @property
    def alias_of(self) -> str:
        """The model that the client's name stands for; empty: it is no alias."""
        return msgspec.json.decode(self.engines_name, type=str) if self.engines_name else ""

    @property
    def session_id(self) -> bytes:
        """vLLM's own field as JSON text; empty where the client gave none."""
        return _text(self._said.session_id)

    @property
    def prompt_cache_key(self) -> bytes:
        """OpenAI's field as JSON text; empty where the client gave none."""
        return _text(self._said.prompt_cache_key)

    def for_decode(self, params: DecodeParams | bytes | None) -> Parts:
        """Decode's body: all that the client sent, byte for byte, then our keys. None: decode prefills by itself."""
        ours = []
        if self._said.ec_transfer_params is not ABSENT:
            ours.append(b'"ec_transfer_params":null')
        if params is not None:
            ours.append(_written(params))
        elif self._said.kv_transfer_params is not ABSENT:
            ours.append(b'"kv_transfer_params":null')
        return self._followed_by(ours)

    def for_prefill(self, reservation: Reservation | bytes) -> Parts:
        """Prefill's body: the same prompt, one token, not streamed, and where the KV goes."""
        return self._followed_by([*self._one_token(), _written(reservation)])

    def for_model(self, name: bytes) -> Self:
        """The same request, for which engines get ``name`` (JSON) as the model's. Empty: they get the client's."""
        return msgspec.structs.replace(self, engines_name=name)

    def renamed(self) -> bytes:
        """The client's bytes with the model's name for engines, and nothing else of ours."""
        return b"".join(self._followed_by([]))

    def forgotten(self) -> ClientBody:
        """The body without its bytes, for when no engine will be sent it any more. It keeps its length in tokens, and
        whether the answer is streamed."""
        return ClientBody(b"", 0, 0, _FORGOTTEN, self.is_stream, self.estimated_prompt_tokens, ABSENT, b"")

    def _one_token(self) -> list[bytes]:
        """Keys that make prefill's answer one token, with nothing that only the client's answer needs."""
        said = _neutral_in(self._said)
        ours: list[bytes] = []
        if said != _NOTHING_TO_NEUTRALIZE:
            ours = [text for value, text in zip(said, _NEUTRAL.values(), strict=True) if value is not ABSENT]
        return [*ours, _ONE_TOKEN]

    def _followed_by(self, ours: list[bytes]) -> Parts:
        """The client's keys and then ours: ours win."""
        head = memoryview(self._raw)[self._begin : self._end]
        if self.engines_name:
            ours = [b'"model":%b' % self.engines_name, *ours]
        if not ours:
            return head, b"}"
        comma = b"," if self._raw.find(b'"') >= 0 else b""  # An object without a quote has no key.
        return head, b"%b%b}" % (comma, b",".join(ours))


def parse_body(raw: Bytes) -> ClientBody:
    """The client's request body, scanned. ``raw`` must not change from now on. Takes 1 ms per MiB of text, or 5 ms per
    MiB of many values.

    Raises:
        BadBody: It is not a JSON object, or its ``vllm_xargs`` names transfer parameters.
    """
    begin, said = scanned(raw, _SAID)
    num_tokens = estimate_prompt_tokens(raw) if said.prompt is ABSENT else tokens_of_text(len(raw))
    return ClientBody(raw, begin, raw.rindex(b"}"), said, bytes(said.stream) in TRUE_FORMS, num_tokens, said.model, b"")


def scanned(raw: Bytes, decoder: msgspec.json.Decoder[S]) -> tuple[int, S]:
    """The index at which the object begins, and its keys. Raises: BadBody: as ``parse_body``."""
    begin = len(_BOM) if raw.startswith(_BOM) else 0
    try:
        said = decoder.decode(memoryview(raw)[begin:] if begin else raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadBody(f"the request body is {_problem_of(error)}") from error
    if said.vllm_xargs is not None:
        _require_no_params(said.vllm_xargs)
    return begin, said


def is_neutral(value: msgspec.Raw, neutral: tuple[bytes, ...]) -> bool:
    """Whether a key is absent, null, or one of the values that ask for nothing."""
    if value is ABSENT:
        return True
    text = bytes(value)
    return text == b"null" or text in neutral


def _problem_of(error: msgspec.DecodeError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    is_json = isinstance(error, msgspec.ValidationError)
    return f"{'not a JSON object as vLLM takes it' if is_json else 'not valid JSON'}: {error}"


def _require_no_params(vllm_xargs: Extra) -> None:
    """Raises: BadBody: ``vllm_xargs`` names transfer parameters."""
    for key in Extra.__struct_fields__:
        if getattr(vllm_xargs, key) is not ABSENT:
            raise BadBody(f"vllm_xargs has {key}: only this router writes it, leave it out")


def _is_one_prompt(prompt: msgspec.Raw) -> bool:
    """Whether it is one text, one list of token ids, or a list that holds one of these.

    Many values are not scanned a second time: a list of lists holds one list if the outer ``]`` follows the first
    ``]``. False for anything else than texts, numbers and lists: that is no prompt, and decode refuses it.
    """
    if prompt is ABSENT or _ONE_PROMPT.match(prompt):
        return True
    if _NESTED.match(prompt):
        end = _LIST_END.search(prompt)
        return end is not None and _ENDS.fullmatch(prompt, end.end()) is not None
    return bool(_TEXTS.match(prompt)) and _has_one(prompt)


def _has_one(values: msgspec.Raw) -> bool:
    try:
        _ONE.decode(values)
    except msgspec.ValidationError:
        return False
    return True


def _text(value: msgspec.Raw) -> bytes:
    """The JSON text of a string that is not empty; no bytes for all else."""
    if value is ABSENT:
        return b""
    text = bytes(value)
    return text if text[:1] == b'"' and text != b'""' else b""


def _name_in(value: msgspec.Raw) -> str:
    text = _text(value)
    try:
        return msgspec.json.decode(text, type=str) if text else ""
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def count_in(value: msgspec.Raw) -> int:
    """The number of tokens that ``value`` names; 0: it is absent, or no such number."""
    if value is ABSENT:
        return 0
    text = bytes(value)
    return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0


def _written(params: DecodeParams | Reservation | bytes) -> bytes:
    if isinstance(params, bytes):  # JSON of another dialect
        return b'"kv_transfer_params":%b' % params
    return b'"kv_transfer_params":%b' % msgspec.json.encode(params)


_apart_in: Final = attrgetter(*PREFILLED_APART)
_neutral_in: Final = attrgetter(*_NEUTRAL)
_but_n_in: Final = attrgetter(*tuple(PREFILLED_APART)[1:])
_BUT_N: Final = tuple(PREFILLED_APART.values())[1:]
_SAYS_NOTHING: Final = (ABSENT,) * len(PREFILLED_APART)
_NOTHING_TO_NEUTRALIZE: Final = (ABSENT,) * len(_NEUTRAL)
_SAID: Final = msgspec.json.Decoder(Said)
_FORGOTTEN: Final = Said()
_ONE: Final = msgspec.json.Decoder(tuple[msgspec.Raw])
"""Gives up at the second element."""
_ONE_PROMPT: Final = re.compile(rb'"|null|\[\s{0,99}+[0-9\]]')
_NESTED: Final = re.compile(rb"\[\s{0,99}+\[")
_TEXTS: Final = re.compile(rb'\[\s{0,99}+"')
_LIST_END: Final = re.compile(rb"\]")
_ENDS: Final = re.compile(rb"\s{0,99}+\]")
"""These patterns skip at most 99 blanks: without that limit, 8 MiB of blanks cost each of them 20 ms, and 120 ms if it
also gives each blank back. Decode by itself prefills a prompt with more blanks in such a place."""
