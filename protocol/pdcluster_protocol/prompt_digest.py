"""A digest of the prompt, by which both engines check that they have the same one. Only the digest travels."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def digest_prompt(token_ids: Sequence[int], media: Sequence[str] = ()) -> str:
    """A short digest of a prompt, equal only for equal token ids and ``media``. Costs about 30 us per 1,000 tokens.

    ``media``: what the placeholders among the tokens stand for, each with its place. A client may have chosen words of
    it.
    """
    digest = blake2b(array("q", token_ids).tobytes(), digest_size=12)
    for one in media:
        said = one.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(said), said))
    return digest.hexdigest()
