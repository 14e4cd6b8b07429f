"""Decides whether decode computes the tokens of a prompt that it lacks itself, or a prefill engine pushes them.

A push costs a call to the router, an order, a step of a prefill engine and the writes, whatever its length. A few
tokens cost decode less: it computes them in its next step. But that step gets longer by them for every stream on the
engine, so one step takes no more of them than one prompt may have.

    least push 64:  missing 20 -> decode; then 40 -> decode, 60 in this step; then 10 -> pushed; next step: 10 -> decode
"""

from __future__ import annotations


def is_local(num_missing: int, *, min_push_tokens: int, num_in_step: int) -> bool:
    """Whether decode computes ``num_missing`` tokens of a prompt, the last one among them, itself.

    ``num_in_step``: tokens that it computes in the step to come instead of a push. The last token is always decode's
    own, so a prompt that lacks no other is never pushed.
    """
    if num_missing <= 1:
        return True
    return num_missing < min_push_tokens and num_in_step + num_missing <= min_push_tokens
