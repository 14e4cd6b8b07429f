"""The images that pods of ``make e2e`` name, put together from layers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from e2e.archive import Image, image_settings
from e2e.layers import ROOT, Say, base_layer, pause_layer, pdcluster_layer
from e2e.node_files import PAUSE_IMAGE
from e2e.pool import ENGINE_IMAGE

PDCLUSTER_REPOSITORY: Final = "e2e.local/pdcluster"
PDCLUSTER_TAG: Final = "1"


def make_images(cache: Path, say: Say) -> tuple[Image, ...]:
    """All of them; layers that are there are taken as they are.

    Raises:
        LayerError: One cannot be made.
    """
    base = base_layer(cache, say)
    env, user = image_settings((ROOT / "images" / "pdcluster.Dockerfile").read_text())
    ours = f"{PDCLUSTER_REPOSITORY}:{PDCLUSTER_TAG}"
    return (
        Image(PAUSE_IMAGE, (pause_layer(cache, say),), command=("/pause",)),
        Image(ENGINE_IMAGE, (base,)),
        Image(ours, (base, pdcluster_layer(cache, base, say)), command=("pdcluster",), user=user, env=env),
    )
