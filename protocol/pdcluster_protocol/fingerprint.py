"""The facts that two engines must share before one may write into the other's KV cache.

The handshake compares them before any byte is written. A difference is refused with a message that names both engines,
both values and the cure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.bounds import Count
from pdcluster_protocol.errors import ProtocolError

CURES: Final[dict[str, str]] = {
    "model_digest": "serve the same model and revision, with the same --hf-overrides and --disable-sliding-window, on "
    "both",
    "kv_dtype": "start both with the same --dtype and --kv-cache-dtype",
    "layout": "use the same attention backend and KV layout on both",
    "kv_heads": "serve the same model on both",
    "attention_backend": "start both with the same attention backend",
    "vllm_version": "install the same vLLM on both",
    "connector_version": "install the same pdcluster on both",
    "state": "start both with the same --mamba-cache-dtype, --mamba-ssm-cache-dtype and VLLM_SSM_CONV_STATE_LAYOUT",
    "positions": "start both with the same --max-model-len and the same generation configuration",
    "draft": "give both the same --speculative-config, or decode alone one of a method that works without prefill's "
    "part of it (mtp, eagle, draft_model, ngram)",
    "draft_heads": "give both the same --speculative-config",
}
_OF_DRAFT: Final = frozenset({"draft", "draft_heads"})
_ALONE: Final = frozenset({"mtp", "eagle", "draft_model"})
"""Methods that decode may use although prefill does not speculate: decode checks each guess, also that of a draft
model without the prompt's KV."""


class KvFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts that decide whether a KV block of one engine means the same in another.

    ``kv_heads``: the distinct numbers of KV heads that layers have in the whole model (not in one rank), ascending.
    ``RankLayout`` has the facts that differ between ranks (block sizes, layers, strides). The connector judges those.
    """

    model_digest: str
    kv_dtype: str
    layout: str
    kv_heads: tuple[Count, ...]
    attention_backend: str
    vllm_version: str
    connector_version: str
    state: str = ""
    """Types and layout of recurrent state; empty for a model without."""
    positions: str = ""
    """The choices about tokens' positions that engines of one model may make differently; empty: there are none."""
    draft: str = ""
    """Method of speculation, and digest of the draft model that keeps KV of its own; empty: no draft model does."""
    draft_heads: tuple[Count, ...] = ()
    """As ``kv_heads``, of the draft model."""

    @property
    def all_kv_heads(self) -> tuple[int, ...]:
        """The distinct numbers of KV heads in layers of model and draft model, ascending."""
        return tuple(sorted({*self.kv_heads, *self.draft_heads}))


def require_equal(*, prefill: KvFingerprint, decode: KvFingerprint, prefill_id: str, decode_id: str) -> None:
    """Both engines store KV alike, apart from a draft model that decode may have alone.

    Raises:
        ProtocolError: They do not. The message names both engines, every differing value and the first cure.
    """
    differing = [name for name in CURES if getattr(prefill, name) != getattr(decode, name)]
    if not differing or (_OF_DRAFT.issuperset(differing) and _may_speculate_alone(prefill, decode)):
        return
    values = "; ".join(
        f"{name}: prefill {getattr(prefill, name)!r}, decode {getattr(decode, name)!r}" for name in differing
    )
    raise ProtocolError(
        f"prefill engine {prefill_id} and decode engine {decode_id} differ in {values}: {CURES[differing[0]]}"
    )


def _may_speculate_alone(prefill: KvFingerprint, decode: KvFingerprint) -> bool:
    """Whether decode may speculate although prefill pushes no KV of a draft model: decode's guesses only get worse.

    Decode may not if the model has recurrent state. vLLM later gives blocks of state to attention, which may read the
    bytes that a state left there as NaN. vLLM cannot correctly check a guess that was drawn at random from NaN.
    """
    return not (prefill.draft or decode.state) and decode.draft.split(" ")[0] in _ALONE
