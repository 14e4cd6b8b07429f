"""Whatever order an older backend keeps, each cell is found at its page, head and token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pdcluster_connector.vllm.cells import in_new_axes
from pdcluster_protocol.errors import ConfigError

PAGES, HEADS, TOKENS, SIZE = 3, 2, 4, 6
"""As many heads as parts: sizes alone do not tell them apart."""


@dataclass(frozen=True)
class Layer:
    """An attention layer of vLLM 0.23 and its backend at once. ``order`` of p(ages), x (K and V), h, t and c."""

    order: str

    def get_attn_backend(self) -> Layer:
        return self

    def get_name(self) -> str:
        return "SOME_ATTN"

    def get_kv_cache_shape(self, pages: int, tokens: int, heads: int, size: int) -> tuple[int, ...]:
        content = size if "x" in self.order or "h" not in self.order else 2 * size
        sizes = {"p": pages, "x": 2, "h": heads, "t": tokens, "c": content, "?": 3}
        return tuple(sizes[axis] for axis in self.order)

    def tensor(self) -> torch.Tensor:
        """Each cell holds its page, head, token and content's place, as a number of four digits."""
        shape = self.get_kv_cache_shape(PAGES, TOKENS, HEADS, SIZE)
        axes = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
        at = dict(zip(self.order, axes, strict=True))
        content = at["c"] + SIZE * at["x"] if "x" in at else at["c"]
        return 1000 * at["p"] + 100 * at.get("h", torch.zeros(())) + 10 * at["t"] + 0.01 * content


def views_of(layer: Layer) -> list[torch.Tensor]:
    found: Any = in_new_axes({"l": layer}, {"l": layer.tensor()})["l"]
    return list(found)


@pytest.mark.parametrize(
    "order",
    [
        "phtc",  # vLLM 0.23's CPU_ATTN
        "pxthc",  # FLASH_ATTN and others
        "xpthc",  # ROCM_ATTN, and vllm-ascend's
        "pthc",
        "ptc",  # MLA
    ],
)
def test_each_cell_is_at_its_page_head_and_token(order: str) -> None:
    heads = HEADS if "h" in order else 1
    views = views_of(Layer(order))
    place = 0
    for view in views:
        assert view.shape[:3] == (PAGES, heads, TOKENS)
        for content in range(view.shape[3]):
            for page, head, token in ((0, 0, 0), (2, heads - 1, 3), (1, 0, 2)):
                wanted = 1000 * page + 100 * head + 10 * token + 0.01 * place
                assert view[page, head, token, content].item() == pytest.approx(wanted)
            place += 1


@pytest.mark.parametrize("order", ["phtc", "pxthc", "ptc"])
def test_views_are_of_the_same_memory(order: str) -> None:
    layer = Layer(order)
    tensor = layer.tensor()
    found: Any = in_new_axes({"l": layer}, {"l": tensor})["l"]
    assert min(view.data_ptr() for view in found) == tensor.data_ptr()


def test_an_order_that_is_not_known_is_refused_with_the_backend_and_the_cure() -> None:
    with pytest.raises(ConfigError, match="its attention backend SOME_ATTN says") as refused:
        in_new_axes({"l": Layer("phtc")}, {"l": torch.zeros(PAGES, TOKENS)})
    assert "choose another --attention-backend" in str(refused.value)


def test_what_is_no_attention_is_left_as_it_is() -> None:
    state = [torch.zeros(PAGES, 3), torch.zeros(PAGES, 5)]
    assert in_new_axes({"l": object()}, {"l": state, "unknown": state[0]}) == {"l": state, "unknown": state[0]}
