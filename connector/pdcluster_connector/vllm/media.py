"""The images, sounds and films of a request: their content decides KV that the prompt's tokens do not tell.

Each stands behind placeholder tokens, the same for every image of one size. vLLM names the content (vLLM 0.32
``multimodal/processing/inputs.py``): by a hash over it and the model's name, or as the client names it (``uuid``).
Both engines fetch an image by themselves, and its URL may bring each of them another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import VllmConfig

from pdcluster_protocol.errors import ConfigError

if TYPE_CHECKING:  # no engine fails because it has moved
    from vllm.v1.request import Request


def media_of(request: Request) -> tuple[str, ...]:
    """The place of each among the prompt's tokens, its number of tokens, and vLLM's name for its content."""
    return tuple(
        f"{one.mm_position.offset} {one.mm_position.length} {one.identifier}" for one in request.mm_features or ()
    )


def require_named_media(config: VllmConfig) -> None:
    """vLLM names media by their content.

    Raises:
        ConfigError: It numbers them, since neither of its caches needs a name (vLLM 0.32 ``renderers/base.py``).
    """
    media = config.model_config.multimodal_config
    if media is None or media.mm_processor_cache_gb > 0 or config.cache_config.enable_prefix_caching:
        return
    raise ConfigError(
        "--mm-processor-cache-gb is 0 and prefix caching is off: vLLM then does not look at the content of images, and "
        "decode could use the KV of another image: leave one of both caches on"
    )
