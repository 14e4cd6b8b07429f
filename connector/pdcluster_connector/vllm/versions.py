"""The version of this vLLM, and its differences from newer versions, as far as the connector meets them.

    0.30 .. 0.33   has all of ``VllmRelease``
    0.29           tells failures by block (no ``KVConnectorTransferResults``), and only the changes of block tables
    0.26 .. 0.28   also has no names of layouts (``v1/kv_cache_layout.py``)
    0.24, 0.25     also may give a block before a sliding window to another request while a running step uses it
    0.23           also may give any block of a request that ends to another one while a running step writes it

``connector.py`` imports this module before any name of vLLM's that some versions lack: an engine of a version that is
not supported ends with one clear line, and not with an ImportError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from vllm import __version__

from pdcluster_protocol.errors import ConfigError

Minor: TypeAlias = tuple[int, int]

OLDEST: Final[Minor] = (0, 23)
NEWEST: Final[Minor] = (0, 33)

DEFERS_FREES: Final[Minor] = (0, 24)
DEFERS_WINDOW_FREES: Final[Minor] = (0, 26)
_NAMES_LAYOUTS: Final[Minor] = (0, 29)
_TELLS_BY_REQUEST: Final[Minor] = (0, 30)


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """One version of vLLM. Each flag says whether this version does as newer ones do."""

    version: str
    defers_frees: bool
    """A block of a request that ends is given to no other one while a running step may still write it
    (``v1/core/sched/scheduler.py``, ``defer_block_free``)."""
    defers_window_frees: bool
    """The same holds for a block before the window of a request that goes on (``v1/core/kv_cache_manager.py``,
    ``allocate_slots``: tokens in flight are not counted as computed)."""
    names_layouts: bool
    """KV is one tensor ``[pages, KV heads, tokens, content]`` of a layout that ``KVCacheConfig`` names."""
    fails_by_request: bool
    """A request whose KV does not come is named in ``failed_recving``. If False, its blocks are named in
    ``invalid_block_ids``. Blocks identify a request only in a model with one KV group (``v1/core/sched/scheduler.py``,
    ``_update_requests_with_invalid_blocks``)."""
    resolves_block_ids: bool
    """The scheduler hands out whole block tables (``kv_connector_block_state.resolve_block_ids``)."""


def release_of(version: str) -> VllmRelease:
    """The release that calls itself ``version``, as ``0.23.0`` or ``0.32.1.dev3+gabc``.

    Raises:
        ConfigError: ``version`` is older or newer than the supported ones, or is no version.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else (0, 0)
    if not OLDEST <= minor <= NEWEST:
        raise ConfigError(
            f"this is vLLM {version}: PDClusterConnector 0.1 supports vLLM {said(OLDEST)} to {said(NEWEST)}: install "
            "one of these on prefill and on decode"
        )
    by_request = minor >= _TELLS_BY_REQUEST
    return VllmRelease(
        version,
        minor >= DEFERS_FREES,
        minor >= DEFERS_WINDOW_FREES,
        minor >= _NAMES_LAYOUTS,
        by_request,
        by_request,
    )


def said(minor: Minor) -> str:
    """``minor`` as users write it: 0.26."""
    return ".".join(map(str, minor))


RELEASE: Final = release_of(__version__)
