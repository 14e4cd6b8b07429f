"""The router's settings as an endpoint picker: each with its unit, default, bounds, and why that default.

A part of ``Settings``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PickerSettings(BaseModel):
    """Where gateways ask this router which engine gets a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    picker_port: int = Field(default=0, ge=0, le=65535)
    """TCP port at which gateways ask which decode engine gets a request: gRPC without TLS, Envoy's external processing
    as the Gateway API Inference Extension has it (docs/gateway.md). Needs the packages of pdcluster[picker]. 0: none,
    for clients ask the router itself."""
