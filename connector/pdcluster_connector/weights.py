"""A digest of a model's weight files: two engines may exchange KV only if they compute with the same weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

_WEIGHT_SUFFIXES: Final = frozenset((".safetensors", ".bin", ".pt", ".gguf"))
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096
"""Per weight file: 256 KiB read at engine start."""


def digest_weights(folder: Path) -> str:
    """Digest of sizes and samples of the weight files; empty when ``folder`` is not a folder (a hub's name).

    A fine-tuned model has the configuration, tensor names and sizes of its base: only bytes tell them apart.
    """
    digest = hashlib.blake2b(digest_size=12)
    files = sorted(path for path in folder.glob("*") if path.suffix in _WEIGHT_SUFFIXES)
    for path in files:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            for part in range(_SAMPLES):
                file.seek(size * part // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else ""
