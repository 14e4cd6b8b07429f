"""The router's settings about its processes: each with its unit, default, bounds, and why that default.

A part of ``Settings``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ProcessSettings(BaseModel):
    """How many processes serve the same ports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    processes: int = Field(default=1, ge=1, le=64)
    """Processes that serve the ports together, one for each core that the router shall have. They share the loads of
    engines, and their metrics and pages are sums; all other limits hold for each of them (docs/operations.md). Engines
    call each at a port of its own, any free one. 1: a core does some thousands of requests a second, and in Kubernetes
    replicas are better."""
