"""Decides whether decode itself computes the missing tokens of a prompt, or a prefill engine pushes their KV.

A push costs a call to the router, an order, a step of a prefill engine and the writes, whatever its length. A few
tokens cost decode less: it computes them in its next step. But these tokens make the step longer for every stream on
the engine, so all prompts together may add at most ``min_push_tokens`` of them to a step.

    min_push_tokens 64:  missing 20 -> decode; then 40 -> decode, 60 in this step; then 10 -> pushed
                         next step: missing 10 -> decode
"""

from __future__ import annotations


def is_local(num_missing: int, *, min_push_tokens: int, num_in_step: int) -> bool:
    """Whether decode itself computes the ``num_missing`` tokens of a prompt, which include the last one.

    ``num_in_step``: missing tokens of other prompts that decode computes in the coming step. Decode always computes
    the last token, so a prompt that lacks only that one is never pushed.
    """
    if num_missing <= 1:
        return True
    return num_missing < min_push_tokens and num_in_step + num_missing <= min_push_tokens
