"""The models that one engine says it serves: its answer to ``GET /v1/models`` (vLLM 0.32 ``openai/models/serving.py``).

    {"data": [{"id": "llama", "root": "/models/llama", "parent": null},            a name of the base model
              {"id": "sql", "root": "/adapters/sql", "parent": "llama"}]}          a LoRA adapter

Only names, and what tells adapters apart, are kept. An engine may answer anything: an answer that is too large, or is
no such list, counts as none. Of a list of too many names the first ones count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdcluster_protocol.errors import NO_JSON

MAX_LIST_BYTES: Final = 4 << 20
"""The most bytes of an answer: twice as many as vLLM writes for ``MAX_MODELS``. They are scanned in 12 ms."""
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


def with_aliases(answer: bytes, aliases: Mapping[str, str]) -> bytes:
    """The list, with a card for each alias whose model is in it: that of the model, under the alias's name.

    A card whose own name is an alias is left out, because requests for that name get another model.

    Raises:
        One of ``NO_JSON``: ``answer`` is no list.
    """
    cards = [(_NAMED.decode(card).id, card) for card in _RAW.decode(answer).data]
    by_name = dict(reversed(cards))
    ours = [_renamed(by_name[model], alias) for alias, model in aliases.items() if model in by_name]
    others = [bytes(card) for name, card in cards if name not in aliases]
    return b'{"object":"list","data":[%b]}' % b",".join([*others, *ours])


def _renamed(card: msgspec.Raw, name: str) -> bytes:
    fields = msgspec.json.decode(card, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "id": name})


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


class ReadList(msgspec.Struct, frozen=True):
    """A list of models as it was read."""

    listing: Listing | None
    """None: the answer is no list, too large, or names no base model."""
    surplus: str = ""
    """Why some models of the list, or all, are not known; empty: none was too many."""


def read_listing(answer: bytes) -> Listing | None:
    """The list in ``answer``; None: as in ``ReadList``."""
    return read_list(answer).listing


def read_list(answer: bytes) -> ReadList:
    """The list in ``answer``, without the models behind the first ``MAX_MODELS``: base models come first in it, then
    adapters in the order in which they were loaded. So one more adapter takes none away that is in use."""
    if len(answer) > MAX_LIST_BYTES:
        problem = f"its list of models has {len(answer)} bytes, and {MAX_LIST_BYTES} are read: the list before stays"
        return ReadList(None, problem)
    try:
        cards = _ANSWER.decode(answer).data
    except NO_JSON:
        return ReadList(None)
    named = sorted((card for card in cards if card.id), key=lambda card: bool(card.parent))
    bases = dict.fromkeys((card.id for card in named[:MAX_MODELS] if not card.parent), BASE)
    if not bases:
        return ReadList(None)
    adapters = {card.id: Identity(card.parent, card.root or "") for card in named[:MAX_MODELS] if card.parent}
    # vLLM looks for a name among those of its base model first.
    return ReadList(Listing(tuple(bases), adapters | bases), _surplus(len(named)))


def _surplus(num_models: int) -> str:
    if num_models <= MAX_MODELS:
        return ""
    return f"it lists {num_models} models, and the first {MAX_MODELS} are known here: clients get 404 for the others"


_ANSWER: Final = msgspec.json.Decoder(_CardList)
_RAW: Final = msgspec.json.Decoder(_RawCards)
_NAMED: Final = msgspec.json.Decoder(_CardName)
