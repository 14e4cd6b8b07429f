"""Images decide KV that the prompt's tokens do not tell, so both engines must have the same ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from pdcluster_connector.vllm.media import media_of, require_named_media
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.prompt_digest import digest_prompt

TOKENS = [7, 8, 8, 8, 9, 8, 8, 8]
"""8 stands for a part of an image."""


def image(content: str, offset: int = 1, length: int = 3) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", content, PlaceholderRange(offset, length))


def digest(*images: MultiModalFeatureSpec) -> str:
    request = Request("r", TOKENS, SamplingParams(max_tokens=1), None, mm_features=list(images))
    return digest_prompt(request.prompt_token_ids or (), media_of(request))


def test_a_prompt_without_images_has_the_digest_of_its_tokens() -> None:
    assert digest() == digest_prompt(TOKENS)


@pytest.mark.parametrize(
    "other",
    [
        [image("cat"), image("cow", 5)],
        [image("dog"), image("cat", 5)],
        [image("cat"), image("dog", 4)],
        [image("cat"), image("dog", 5, 2)],
        [image("cat")],
        [image("cat"), image("dog", 5), image("dog", 5)],
        [],
    ],
)
def test_other_images_or_other_places_are_another_prompt(other: list[MultiModalFeatureSpec]) -> None:
    one = [image("cat"), image("dog", 5)]
    assert digest(*one) == digest(*one)
    assert digest(*one) != digest(*other)


def test_a_name_that_a_client_chose_passes_for_nothing_else() -> None:
    assert digest(image("a1:1 3 b")) != digest(image("a"), image("b"))
    assert digest(image("\ud800")) != digest(image("\0"))


def an_engine(cache_gb: float | None, *, caches_prefixes: bool) -> Any:
    media = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
    )


@pytest.mark.parametrize(
    "engine",
    [an_engine(4, caches_prefixes=False), an_engine(0, caches_prefixes=True), an_engine(None, caches_prefixes=False)],
)
def test_vllm_names_images_for_either_cache(engine: Any) -> None:
    require_named_media(engine)


def test_an_engine_that_only_numbers_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--mm-processor-cache-gb is 0 and prefix caching is off.*leave one of both"):
        require_named_media(an_engine(0, caches_prefixes=False))
