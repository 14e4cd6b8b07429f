"""Prompts around every border that a hand-over knows: 200 of 1..3,000 tokens, some sharing prefixes, some repeated."""

from __future__ import annotations

import random
from typing import Final

BLOCK: Final = 128
PROMPT: Final = [100 + (number * 11) % 800 for number in range(520)]
"""Four blocks and a part of one."""
LONG: Final = [100 + (number * 13) % 800 for number in range(3000)]
_VOCAB: Final = range(50, 1000)
_BORDERS: Final = (
    1,
    2,
    16,
    127,
    128,
    129,
    255,
    256,
    257,
    383,
    384,
    385,
    1023,
    1024,
    1025,
    2047,
    2048,
    2049,
    2999,
    3000,
)


def make_prompts(count: int = 200, seed: int = 3) -> list[list[int]]:
    """``count`` prompts as token ids; the same for the same arguments."""
    rng = random.Random(seed)
    prompts = [_tokens(rng, length) for length in _BORDERS]
    shared = _tokens(rng, 5 * BLOCK + 40)
    prompts += [[*shared[:cut], *_tokens(rng, rng.randint(1, 300))] for cut in (BLOCK, 200, 3 * BLOCK, 600, 679) * 4]
    prompts += [list(prompt) for prompt in rng.sample(prompts, 20)]
    prompts += [
        _tokens(rng, rng.randint(1, 3000) if rng.random() < 0.3 else rng.randint(1, 600))
        for _ in range(count - len(prompts))
    ]
    rng.shuffle(prompts)
    return prompts[:count]


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(_VOCAB) for _ in range(length)]
