"""The ways in which a fake engine can go wrong, and the steps at which a test can stop one."""

from __future__ import annotations

from enum import Enum, auto


class Fault(Enum):
    NONE = auto()
    ERROR_500 = auto()
    ERROR_503 = auto()
    ERROR_TEXT = auto()
    """500 as text/plain, as a server that crashed in a handler."""
    ERROR_404 = auto()
    HANG = auto()
    """Reads the request and never says a word."""
    DIE = auto()
    """Closes the connection instead of answering."""
    DIE_WITH_KV = auto()
    """Decode has all KV and closes the connection instead of its first token."""
    DIE_MID_STREAM = auto()
    ERROR_MID_STREAM = auto()
    """As vLLM when its engine core dies: an error event, and then a clean end."""
    GIVE_UP = auto()
    """As vLLM when it is told to stop: what there is of the answer, a finish reason, and a clean end."""
    EMPTY_200 = auto()
    NOT_HTTP = auto()
    MUCH = auto()
    """To a question: the largest answer that a router takes."""
    TOO_MUCH = auto()
    """A response, and another one that nobody asked for."""
    RAW = auto()
    """What the engine's ``raw`` says, byte for byte."""
    CACHED = auto()
    """Decode has the whole prompt: no reservation. As an engine that does not say so."""
    LOCAL = auto()
    """Decode computes what it lacks of the prompt itself, and says so."""
    LOCAL_AND_DIE = auto()
    """The same, and it closes the connection instead of its first token."""
    RECOMPUTE = auto()
    """Decode goes on by itself when prefill fails; without it the request fails."""
    HANG_UP_ON_METASERVER = auto()
    """Decode gives up waiting for the outcome, and fails the request."""
    GO_ON_AFTER_PUSH = auto()
    """Decode answers once the KV is there, while the metaserver's reply is still out, as our connector does."""
    IGNORE_OUTCOME = auto()
    """Decode waits for the push for ever, whatever the metaserver says."""


class Gate(Enum):
    RESERVE = auto()
    """Before decode's reservation."""
    PREFILL = auto()
    """Before prefill computes."""
    REPLY = auto()
    """After the push, before prefill's reply."""
    ANSWER = auto()
    """Before decode's answer, when it has all KV, or none will come."""
    SECOND_TOKEN = auto()
