"""What two engines must share before one may write into the other's KV cache.

Compared once, at the handshake, before any byte is written. A difference is refused with a message
that names who, both values and the cure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdcluster_protocol.errors import ProtocolError

CURES: Final[dict[str, str]] = {
    "model_digest": "serve the same model and revision on both",
    "kv_dtype": "start both with the same --dtype and --kv-cache-dtype",
    "block_size": "start both with the same --block-size",
    "layout": "use the same attention backend and KV layout on both",
    "kv_heads": "serve the same model on both",
    "head_bytes": "serve the same model with the same --kv-cache-dtype on both",
    "num_layers": "serve the same model on both",
    "attention_backend": "start both with the same attention backend",
    "vllm_version": "install the same vLLM on both",
    "connector_version": "install the same pdcluster on both",
}


class KvFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts that decide whether a KV block of one engine means the same in another.

    ``kv_heads`` counts the KV heads of the whole model (not of one rank); ``head_bytes`` is the size of
    one token's K and V of one head in one layer, in bytes.
    """

    model_digest: str
    kv_dtype: str
    block_size: int
    layout: str
    kv_heads: int
    head_bytes: int
    num_layers: int
    attention_backend: str
    vllm_version: str
    connector_version: str


def require_equal(*, prefill: KvFingerprint, decode: KvFingerprint, prefill_id: str, decode_id: str) -> None:
    """Both engines store KV alike.

    Raises:
        ProtocolError: They do not. Names both engines, every differing value and the first cure.
    """
    differing = [name for name in CURES if getattr(prefill, name) != getattr(decode, name)]
    if not differing:
        return
    values = "; ".join(
        f"{name}: prefill {getattr(prefill, name)!r}, decode {getattr(decode, name)!r}" for name in differing
    )
    raise ProtocolError(
        f"prefill engine {prefill_id} and decode engine {decode_id} differ in {values}: {CURES[differing[0]]}"
    )
