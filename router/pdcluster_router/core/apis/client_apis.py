"""The APIs that clients speak, and what the router must know of each. A request's path chooses its API.

/v1/completions, /v1/chat/completions   OpenAI's
/v1/messages                            Anthropic's: ``messages.py``, and decision 0026
/v1/responses                           OpenAI's newer one: ``responses.py``, and decision 0058
/v1/embeddings, /score, /rerank, ...    vLLM's for pooling models: ``pooling.py``, and decision 0059
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pdcluster_router.core.apis import anthropic_errors, messages, responses, responses_stream
from pdcluster_router.core.apis.openai_errors import ApiError, messages_not_served, responses_not_served
from pdcluster_router.core.apis.pooling import POOLING_PATHS, SCORING_PATHS, PoolingWatch, parse_pooling, parse_scoring
from pdcluster_router.core.apis.rewrite import Bytes, ClientBody, parse_body
from pdcluster_router.core.apis.sse import (
    NO_MARKS,
    ErrorWatch,
    error_event,
    first_event_end,
    given_up_in,
    refusal_event,
)


@dataclass(frozen=True, slots=True)
class ClientApi:
    """The part of bodies, answers and errors that differs from API to API."""

    parse: Callable[[Bytes], ClientBody]
    """Raises ``BadBody``."""
    error_body: Callable[[ApiError], bytes]
    error_event: Callable[[ApiError], bytes]
    refusal_event: Callable[[bytes], bytes]
    """An engine's error body in a stream that has begun."""
    first_event: Callable[[Bytes], tuple[int, int]]
    """Begin and end of the event that may be an error. The end is -1 while that event is not whole; until then the
    stream is held back."""
    gives_up_first: Callable[[bytes], str] | None
    """Says why that event shows that the engine gave the request up; empty: it does not. None: no single event shows
    it."""
    watch: Callable[[Mapping[bytes, str]], ErrorWatch]
    marks: Mapping[bytes, str] | None
    """Bytes that mark a stream as given up by its engine, each with the reason that the client is told. None: the marks
    of the engines' dialect."""
    unfinished: Callable[[Bytes], str] | None
    """Says why an answer that is not streamed is not whole. None: the router asks only HTTP whether such an answer is
    whole, and a long one goes to the client as it comes."""
    prefill_problem: Callable[[Bytes], str]
    """Says why prefill has failed although its answer has status 200; empty: prefill has not failed."""
    not_served: Callable[[str], ApiError] | None = None
    """Makes the refusal of this API; gets the reason. None: each broken answer of this API looks broken, so no dialect
    of engines is refused."""
    begins_early: bool = False
    """Whether vLLM begins a stream before its engine works. Its first events then repeat the request, and vLLM cuts the
    stream where those of other APIs tell an error. Prefill's answer repeats the request too."""
    shows_broken: bool = True
    """Whether an answer that its engine gave up looks broken to its client. If not, the router must see each answer."""
    held: Callable[[int], None] | None = None
    """Called each time that a held answer (one that is kept until it is whole) grows, with its bytes so far; may end
    the request. None: held answers have a limit of their own."""
    for_less: str = "ask for less at once"
    """The advice to a client whose answer is too large."""
    is_pooling: bool = False
    """Whether one decode engine serves each request by itself, without a prefill engine. Its answer has no tokens."""

    def max_echo_bytes(self, num_body_bytes: int) -> int:
        """The most bytes of early events that may repeat a request of ``num_body_bytes``. Two events do, and vLLM
        writes defaults into them."""
        return 8 * num_body_bytes if self.begins_early else 0


OPENAI: Final = ClientApi(
    parse=parse_body,
    error_body=ApiError.body,
    error_event=error_event,
    refusal_event=refusal_event,
    first_event=lambda stream: (0, first_event_end(stream)),
    gives_up_first=None,
    watch=ErrorWatch,
    marks=None,
    unfinished=None,
    prefill_problem=given_up_in,
)
MESSAGES: Final = ClientApi(
    parse=messages.parse_messages,
    error_body=anthropic_errors.error_body,
    error_event=anthropic_errors.error_event,
    refusal_event=anthropic_errors.refusal_event,
    first_event=messages.first_event,
    gives_up_first=None,
    watch=messages.MessagesWatch,
    marks=messages.GAVE_UP,
    unfinished=messages.unfinished,
    prefill_problem=messages.unfinished,
    not_served=messages_not_served,
)
RESPONSES: Final = ClientApi(
    parse=responses.parse_responses,
    error_body=ApiError.body,
    error_event=responses_stream.error_event,
    refusal_event=responses_stream.refusal_event,
    first_event=responses_stream.first_event,
    gives_up_first=responses_stream.gives_up,
    watch=responses_stream.ResponsesWatch,
    marks=NO_MARKS,
    unfinished=responses.unfinished,
    prefill_problem=responses.unfinished,
    not_served=responses_not_served,
    begins_early=True,
    shows_broken=False,
)
POOLING: Final = replace(
    OPENAI,
    parse=parse_pooling,
    watch=PoolingWatch,
    marks=NO_MARKS,
    for_less="ask for the encoding_format float or base64, or send fewer texts at once",
    is_pooling=True,
)
SCORING: Final = replace(POOLING, parse=parse_scoring)

MESSAGES_PATH: Final = b"/v1/messages"
RESPONSES_PATH: Final = b"/v1/responses"
API_OF: Final = {
    b"/v1/chat/completions": OPENAI,
    b"/v1/completions": OPENAI,
    MESSAGES_PATH: MESSAGES,
    RESPONSES_PATH: RESPONSES,
    **dict.fromkeys(POOLING_PATHS, POOLING),
    **dict.fromkeys(SCORING_PATHS, SCORING),
}
REQUEST_PATHS: Final = frozenset(API_OF)
"""A POST to one of these paths is served by a prefill and a decode engine, or by a decode engine alone."""


def api_of(path: bytes) -> ClientApi:
    """The API of a client that asks for ``path``, which need not be one of ``REQUEST_PATHS``."""
    if path == MESSAGES_PATH or path.startswith(b"/v1/messages/"):
        return MESSAGES
    return RESPONSES if path == RESPONSES_PATH else OPENAI
