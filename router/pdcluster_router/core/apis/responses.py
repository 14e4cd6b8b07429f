"""OpenAI's Responses API as vLLM speaks it (0.23 to 0.33, ``entrypoints/openai/responses``): bodies and whole answers.

    client    {"input": "...", ...}
    decode    {"input": "...", ... ,"store":false,"kv_transfer_params":{...,"wants_whole":true}}
    prefill   {"input": "...", ... ,"store":false,"stream":false,"max_output_tokens":1,"kv_transfer_params":{...}}

vLLM calls an answer ``completed`` also when its engine has given the request up. So the router asks the engine's
connector to say that it has not (``pdcluster_protocol/whole.py``), and an answer without that word is lost.
``responses_stream.py`` has the same for streams. Decision 0058 has the reasons of what is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from pdcluster_protocol.errors import NO_JSON
from pdcluster_protocol.params import DecodeParams, Reservation
from pdcluster_protocol.whole import ALONE, SaidWhole
from pdcluster_router.core.apis.estimate import estimate_prompt_tokens
from pdcluster_router.core.apis.rewrite import (
    ABSENT,
    TRUE_FORMS,
    BadBody,
    Bytes,
    ClientBody,
    Parts,
    Said,
    count_in,
    is_neutral,
    scanned,
)

NOT_WHOLE: Final = "it gave the request up, or its connector is older than this router: run the same pdcluster on both"
SEVERAL_TURNS: Final = (
    "it called a tool by itself and went on, and the router cannot tell whether such an answer is whole: "
    "start vLLM without --tool-server"
)
UNPROVEN: Final = frozenset((NOT_WHOLE, SEVERAL_TURNS))
"""Reasons that say nothing of an engine's health."""
_ENGINES_TOOLS: Final = frozenset(("code_interpreter", "container", "mcp", "web_search_preview"))
"""Types of tools that vLLM calls by itself, in several requests of which each would have its own prefill."""
MAX_METADATA_BYTES: Final = 64 << 10
"""OpenAI's API takes 16 pairs of up to 576 characters. Metadata is no part of the prompt, so nothing else bounds it."""
_NOT_STORED: Final = b'"store":false'
_ONE_TOKEN: Final = b'"stream":false,"max_output_tokens":1'
_NEUTRAL: Final[dict[str, bytes]] = {
    "ec_transfer_params": b'"ec_transfer_params":null',
    "enable_response_messages": b'"enable_response_messages":false',
    "include": b'"include":null',
    "metadata": b'"metadata":null',
    "top_logprobs": b'"top_logprobs":0',
}
"""Prefill gets these in place of the keys that the client gave: no client sees its answer."""


class _Tool(msgspec.Struct, gc=False):
    type: str = ""


class ResponsesSaid(Said):
    """The keys of ``Said``, and those that matter only in this API."""

    input: msgspec.Raw = ABSENT
    max_output_tokens: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    background: msgspec.Raw = ABSENT
    stop: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT
    enable_response_messages: msgspec.Raw = ABSENT
    include: msgspec.Raw = ABSENT
    metadata: msgspec.Raw = ABSENT
    tools: list[_Tool] | None = None


class ResponsesBody(ClientBody, frozen=True):
    """A request of the Responses API, scanned once."""

    _said: ResponsesSaid

    @property
    def needs_local_prefill(self) -> bool:
        """Whether vLLM may cut the prompt to what ``max_output_tokens`` leaves of its context (0.23): prefill's is
        another number."""
        return not is_neutral(self._said.truncation, (b'"disabled"',))

    @property
    def wants_decode_alone(self) -> bool:
        """True: no request of this API is taken apart."""
        return True

    @property
    def max_answer_tokens(self) -> int | None:
        return count_in(self._said.max_output_tokens) or None

    @property
    def messages(self) -> msgspec.Raw:
        """A list of items; empty where the client wrote one text."""
        return self._input_of(b"[")

    @property
    def prompt(self) -> msgspec.Raw:
        """One text; empty where the client wrote a list of items."""
        return self._input_of(b'"')

    def for_decode(self, params: DecodeParams | bytes | None) -> Parts:
        if params is None:
            params = ALONE
        elif isinstance(params, DecodeParams):
            params = msgspec.structs.replace(params, wants_whole=True)
        return super().for_decode(params)

    def for_prefill(self, reservation: Reservation | bytes) -> Parts:
        if isinstance(reservation, Reservation):
            reservation = msgspec.structs.replace(reservation, wants_whole=True)
        return super().for_prefill(reservation)

    def _input_of(self, begin: bytes) -> msgspec.Raw:
        given = self._said.input
        return given if memoryview(given)[:1] == begin else ABSENT

    def _one_token(self) -> list[bytes]:
        ours = [text for key, text in _NEUTRAL.items() if getattr(self._said, key) is not ABSENT]
        return [*ours, _ONE_TOKEN]

    def _followed_by(self, ours: list[bytes]) -> Parts:
        return super()._followed_by([_NOT_STORED, *ours])


class _InputDetails(msgspec.Struct):
    input_tokens_per_turn: list[int] = []


class _UsageOfTurns(msgspec.Struct):
    input_tokens_details: _InputDetails | None = None


class Response(msgspec.Struct):
    """The keys of an answer that say whether it is whole; all else is skipped."""

    kv_transfer_params: SaidWhole | None = None
    usage: _UsageOfTurns | None = None

    @property
    def problem(self) -> str:
        """Why the answer is not whole; empty: it is."""
        if self.kv_transfer_params is None or not self.kv_transfer_params.pdcluster_is_whole:
            return NOT_WHOLE
        details = self.usage.input_tokens_details if self.usage is not None else None
        return SEVERAL_TURNS if details is not None and len(details.input_tokens_per_turn) > 1 else ""


def parse_responses(raw: Bytes) -> ResponsesBody:
    """The client's request body, scanned. ``raw`` must not change from now on.

    Raises:
        BadBody: It is not a JSON object, its ``vllm_xargs`` names transfer parameters, or it asks for what is not
            served: a stored response, one in the background, a stop text, long metadata, or a tool that vLLM calls by
            itself.
    """
    begin, said = scanned(raw, _SAID)
    if problem := next(_not_served(said), ""):
        raise BadBody(problem)
    is_stream, num_tokens = bytes(said.stream) in TRUE_FORMS, estimate_prompt_tokens(raw)
    return ResponsesBody(raw, begin, raw.rindex(b"}"), said, is_stream, num_tokens, said.model, b"")


def unfinished(answer: Bytes) -> str:
    """Why an answer that is not streamed is not whole; empty: it is whole. Prefill's answer of one token comes here
    too."""
    try:
        return _RESPONSE.decode(answer).problem
    except NO_JSON:
        return NOT_WHOLE


def _not_served(said: ResponsesSaid) -> Iterator[str]:
    """The demands of the client that are not met, each with the cure."""
    if not is_neutral(said.previous_response_id, ()):
        yield "previous_response_id is set, and no response is stored here: send the whole conversation as input"
    if not is_neutral(said.background, (b"false",)):
        yield "background is set, and no response is stored here: leave it out, and stream a long answer"
    if not is_neutral(said.stop, (b"[]", b'""')):
        yield "stop is set, and vLLM does not say of such an answer that it is whole: use /v1/chat/completions"
    if len(memoryview(said.metadata)) > MAX_METADATA_BYTES:
        yield f"metadata has more than {MAX_METADATA_BYTES} bytes, and vLLM repeats it in each answer: send less"
    for tool in said.tools or ():
        if tool.type in _ENGINES_TOOLS:
            yield f"a tool has type {tool.type}, and engines here call no tools: give functions, and call them yourself"


_SAID: Final = msgspec.json.Decoder(ResponsesSaid)
_RESPONSE: Final = msgspec.json.Decoder(Response)
