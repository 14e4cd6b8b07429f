"""The models that one engine says it serves: its answer to ``GET /v1/models`` (vLLM 0.32 ``openai/models/serving.py``).

    {"data": [{"id": "llama", "root": "/models/llama", "parent": null},            a name of the base model
              {"id": "sql", "root": "/adapters/sql", "parent": "llama"}]}          a LoRA adapter

Only names, and what tells adapters apart, are kept. An engine may answer anything: an answer that is too large, or is
no such list, counts as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from pdcluster_protocol.errors import NO_JSON

MAX_LIST_BYTES: Final = 1 << 20
"""The most bytes of an answer: vLLM writes 500 for a model, so these are 2,000 adapters. It is scanned in 3 ms."""
MAX_MODELS: Final = 4096
"""The most names of one engine: each is an entry in a dictionary, and an answer may have shorter ones than vLLM's."""


class Identity(msgspec.Struct, frozen=True, order=True):
    """The facts of a name that must be the same on two engines, so that one can use the other's KV.

    Empty for a base model: the connectors compare its configuration when they meet (``fingerprint.py``).
    """

    parent: str = ""
    """The base model that an adapter is for; empty for a base model."""
    root: str = ""
    """Where an adapter was loaded from. New weights under the old name come from another place: vLLM itself asks for
    that, since its prefix cache would give old KV to the new adapter."""


BASE: Final = Identity()


class Listing(msgspec.Struct, frozen=True):
    """The names that one engine serves. The order of adapters does not count when two lists are compared."""

    bases: tuple[str, ...]
    """Names of its base model, as it lists them: the first one is the model of a request that names none."""
    _by_name: dict[str, Identity]

    def get(self, name: str) -> Identity | None:
        """The identity of ``name`` on this engine; None: it does not serve it."""
        return self._by_name.get(name)


def joined(answers: Sequence[bytes]) -> bytes:
    """One list of all models in these lists, each as its engine wrote it, and each name once.

    Raises:
        One of ``NO_JSON``: An answer is no list.
    """
    cards: dict[str, msgspec.Raw] = {}
    for answer in answers:
        for card in _RAW.decode(answer).data:
            cards.setdefault(_NAMED.decode(card).id, card)
    return b'{"object":"list","data":[%b]}' % b",".join(map(bytes, cards.values()))


class _RawCards(msgspec.Struct):
    data: list[msgspec.Raw]


class _CardName(msgspec.Struct):
    id: str


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _CardList(msgspec.Struct):
    data: list[_Card]


def read_listing(answer: bytes) -> Listing | None:
    """The list in ``answer``; None: it is no list, too large, names no base model, or more than ``MAX_MODELS``
    models."""
    if len(answer) > MAX_LIST_BYTES:
        return None
    try:
        cards = _ANSWER.decode(answer).data
    except NO_JSON:
        return None
    bases = dict.fromkeys((card.id for card in cards if card.id and not card.parent), BASE)
    if not bases or len(cards) > MAX_MODELS:
        return None
    adapters = {card.id: Identity(card.parent, card.root or "") for card in cards if card.id and card.parent}
    return Listing(tuple(bases), adapters | bases)  # vLLM looks for a name among those of its base model first.


_ANSWER: Final = msgspec.json.Decoder(_CardList)
_RAW: Final = msgspec.json.Decoder(_RawCards)
_NAMED: Final = msgspec.json.Decoder(_CardName)
