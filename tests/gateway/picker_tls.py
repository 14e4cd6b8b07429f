"""How Envoy asks a picker with TLS: the example of `docs/gateway.md`, with the files of a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "gateway.md"
SERVER_NAME: Final = "tiny-router-internal.default.svc"
"""The name in the page's example."""


@dataclass(frozen=True, slots=True)
class PickerTls:
    """Whom Envoy trusts, and the folder with its own certificate; None: it has none."""

    ca: Path
    shows: Path | None = None
    is_asked_anew: bool = False
    """Whether each request has a connection of its own."""

    def add_to(self, cluster: dict[str, Any]) -> None:
        """The cluster's endpoints are asked so."""
        socket = example()
        common = socket["typed_config"]["common_tls_context"]
        common["validation_context"]["trusted_ca"]["filename"] = str(self.ca)
        if self.shows is None:
            del common["tls_certificates"]
        else:
            pair = common["tls_certificates"][0]
            pair["certificate_chain"]["filename"] = str(self.shows / "tls.crt")
            pair["private_key"]["filename"] = str(self.shows / "tls.key")
        cluster["transport_socket"] = socket
        if self.is_asked_anew:
            options = next(iter(cluster["typed_extension_protocol_options"].values()))
            options["common_http_protocol_options"] = {"max_requests_per_connection": 1}


def example() -> dict[str, Any]:
    """The page's ``transport_socket``."""
    _, _, behind = PAGE.read_text().partition("```yaml\ntransport_socket:\n")
    found: dict[str, Any] = yaml.safe_load(behind.partition("```")[0])
    return found
