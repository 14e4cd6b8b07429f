"""How many instances of each role there shall be: the spec's numbers, or those of the scalers within the ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pdcluster_operator.api.base import MAX_REPLICAS
from pdcluster_operator.api.cluster import PDClusterSpec, ScalingMode
from pdcluster_operator.core.scaling import Bounds, Pair, exact_ratio
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.labels import Role

_MOST: Final = Pair(MAX_REPLICAS, MAX_REPLICAS)


def wanted_of(spec: PDClusterSpec, scalers: Mapping[Role, int]) -> Mapping[Role, int]:
    """``scalers``: replicas that somebody wishes, of those that are there; a role without one starts with its own.

    Raises:
        ConfigError: No numbers fit the ratio.
    """
    own = Pair(spec.roles.prefill.replicas, spec.roles.decode.replicas)
    if spec.scaling.mode is ScalingMode.FIXED:
        return _by_role(own)
    wish = Pair(scalers.get(Role.PREFILL, own.prefill), scalers.get(Role.DECODE, own.decode))
    return _by_role(_bounds_of(spec).fit(wish))


def _bounds_of(spec: PDClusterSpec) -> Bounds:
    ratio = spec.scaling.ratio
    if ratio is None:
        return Bounds(most=_MOST)
    try:
        return Bounds(exact_ratio(ratio.min), exact_ratio(ratio.max), most=_MOST)
    except ValueError as error:
        raise ConfigError(f"scaling.ratio: {error}") from error


def _by_role(pair: Pair) -> Mapping[Role, int]:
    return {Role.PREFILL: pair.prefill, Role.DECODE: pair.decode}
