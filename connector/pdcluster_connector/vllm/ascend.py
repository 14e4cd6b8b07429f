"""Layouts of vllm-ascend 0.23 that neither its specs nor its tensors show; each is refused.

    enable_kv_nz     latents lie as [content / 16][token][16] in a page (FRACTAL_NZ), on decode only; the tensors of
                     both engines say [blocks, tokens, 1, content]
    hamming_sparse   a second cache, of hashes of keys, chooses which tokens are attended to; no connector gets it

Source of truth: vllm-ascend 0.23.0.post1 ``ascend_config.py``, ``attention/mla_v1.py``, ``worker/kvcomp_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdcluster_protocol.errors import ConfigError


def require_plain_kv(additional_config: object) -> None:
    """A page's bytes mean what its tensor says, and the tensors hold all that a request keeps.

    Raises:
        ConfigError: ``--additional-config`` says otherwise.
    """
    said = additional_config if isinstance(additional_config, Mapping) else {}
    if said.get("enable_kv_nz"):
        raise ConfigError(
            f"enable_kv_nz is {said['enable_kv_nz']} in --additional-config: decode would keep KV in FRACTAL_NZ, and "
            "prefill pushes it row by row: start decode without it"
        )
    if _is_on(said.get("hamming_sparse")):
        raise ConfigError(
            f"hamming_sparse is {said['hamming_sparse']} in --additional-config: its hashes of keys are not pushed, "
            "and decode would attend to the wrong tokens: start both without it"
        )


def _is_on(hamming_sparse: object) -> bool:
    return isinstance(hamming_sparse, Mapping) and bool(hamming_sparse.get("enabled"))
