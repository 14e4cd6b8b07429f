"""The router's settings as an endpoint picker: each with its unit, default, bounds, and why that default.

A part of ``Settings``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdcluster_router.settings.forms import check_pair


class PickerSettings(BaseModel):
    """Where gateways ask this router which engine gets a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    picker_port: int = Field(default=0, ge=0, le=65535)
    """TCP port at which gateways ask which decode engine gets a request: gRPC, Envoy's external processing as the
    Gateway API Inference Extension has it (docs/gateway.md). Needs the packages of pdcluster[picker]. 0: none, for
    clients ask the router itself."""
    picker_tls_cert: Path | None = None
    """PEM file with the certificate that gateways are shown, followed by the intermediate certificates. The picker's
    port then speaks TLS 1.2 and 1.3 only. None: no TLS, for a network that only gateways can reach."""
    picker_tls_key: Path | None = None
    """PEM file with the private key of ``picker_tls_cert``, without a password: RSA with 2048 bits or more, or ECDSA
    with P-256 or P-384. Envoy and gRPC make no handshake with others. None: no TLS."""
    picker_client_ca: Path | None = None
    """PEM file with the authorities by whose certificates gateways must show who they are (mTLS). Each gateway with a
    certificate of them may ask, whatever its name. Gateways' keys are of the same kinds as ``picker_tls_key``. None: no
    client certificate is required."""

    @model_validator(mode="after")
    def _has_whole_picker_tls(self) -> Self:
        cert, key = self.picker_tls_cert, self.picker_tls_key
        check_pair("--picker-tls-cert", cert, "--picker-tls-key", key, "for gRPC in the clear")
        if self.picker_client_ca is not None and cert is None:
            raise ValueError("--picker-client-ca: it needs --picker-tls-cert and --picker-tls-key")
        if cert is not None and not self.picker_port:
            raise ValueError(f"--picker-tls-cert {cert}: there is no port for gateways, give --picker-port with it")
        return self
