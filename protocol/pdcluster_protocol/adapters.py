"""The LoRA adapter with which a request's KV is computed, as two engines compare it before any byte is written.

Adapters change under their names while engines run, and one engine may have loaded the new weights before the other.
So the engines compare the content of what each has loaded, request by request. They compare no path and no time of a
file: those differ between machines that hold the same adapter.
"""

from __future__ import annotations

import msgspec


class AdapterContent(msgspec.Struct, frozen=True, array_like=True):
    """An adapter as one engine has loaded it."""

    name: str
    """The name by which requests ask for it. It is for messages; two names may have the same content."""
    content: str
    """Digest of the files that the engine has loaded."""
    use: str
    """The options of the engine that decide what the files mean to it."""


def difference(
    *, prefill: AdapterContent | None, decode: AdapterContent | None, prefill_id: str, decode_id: str
) -> str:
    """Why KV that was computed with ``prefill`` is of no use to a request of ``decode``; empty: it is of use.

    None: the request has no adapter there. The message names both engines, both values and the cure.
    """
    if prefill is None and decode is None:
        return ""
    if prefill is not None and decode is not None and prefill.content == decode.content:
        if prefill.use == decode.use:
            return ""
        return (
            f"prefill engine {prefill_id} uses LoRA adapter {prefill.name!r} with {prefill.use}, decode engine "
            f"{decode_id} with {decode.use}: start both with the same LoRA options"
        )
    return (
        f"prefill engine {prefill_id} computes with {_said(prefill)}, decode engine {decode_id} with {_said(decode)}: "
        "give both engines the same files, then reload the adapter on both (/v1/load_lora_adapter) or restart them"
    )


def _said(adapter: AdapterContent | None) -> str:
    return f"LoRA adapter {adapter.name!r} of content {adapter.content}" if adapter else "no LoRA adapter"
