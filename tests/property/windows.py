"""What vLLM keeps of a prompt in a group with a window: on prefill before its last step, on decode for the whole."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from pdcluster_connector.core.ranges import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Window:
    """``num_tokens``: what a token sees, itself included, or the length of a chunk (chunked local attention)."""

    num_tokens: int
    is_chunked: bool = False

    @property
    def step(self) -> int:
        """Windows begin at multiples of it."""
        return self.num_tokens if self.is_chunked else 1

    def first_token(self, num_computed: int) -> int:
        """Same as ``get_num_skipped_tokens`` in vLLM 0.32 ``single_type_kv_cache_manager.py``."""
        if self.is_chunked:
            return num_computed // self.num_tokens * self.num_tokens
        return max(0, num_computed - self.num_tokens + 1)

    def kept(self, num_computed: int, blocks: tuple[int, ...], block_tokens: int) -> tuple[int, ...]:
        """The table with null blocks before the window of token ``num_computed``."""
        out = self.first_token(num_computed) // block_tokens
        return (NULL_BLOCK,) * out + blocks[out:]

    def may_lack(self, prefill_block: int, decode_block: int) -> bool:
        """Whether decode wants, for some prompt, a token that prefill recycled before the prompt's last token.

        Beyond the prompts looked at, the beginnings of chunks fall into blocks as before.
        """
        max_tokens = (self.num_tokens + 1) * (decode_block + 1)
        return any(
            self.first_token(num_tokens - 1) // prefill_block * prefill_block
            > self.first_token(num_tokens) // decode_block * decode_block
            for num_tokens in range(1, max_tokens)
        )


@st.composite
def windows(draw: st.DrawFn, prefill_block: int, decode_block: int) -> Window | None:
    """One with which no token is lacking; None: the group has no window."""
    window = Window(draw(st.integers(1, 80)), draw(st.booleans()))
    if draw(st.booleans()) or (decode_block > prefill_block and window.step % decode_block):
        return None
    return window
