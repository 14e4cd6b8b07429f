"""Starts the export of spans, in a router whose settings ask for it.

Only then are the packages of ``pdcluster[otlp]`` imported: 0.1 s of CPU and 4 MB that other routers save.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.settings.span_settings import TRACES_PATH, otlp_headers_of, pairs_in

if TYPE_CHECKING:
    from pdcluster_router.telemetry.span_export import SpanExport


def span_export_of(settings: Settings, count_lost: Callable[[int], None]) -> SpanExport | None:
    """The export that ``settings`` ask for; None: they ask for none.

    Raises:
        ConfigError: A package or a file is missing.
    """
    if settings.otlp_endpoint is None:
        return None
    try:
        from pdcluster_router.telemetry.otlp import SpanCollector, SpanEncoder
        from pdcluster_router.telemetry.span_export import SpanExport
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint: {error}: pip install 'pdcluster[router,otlp]'") from error
    url = settings.otlp_endpoint + TRACES_PATH
    collector = SpanCollector(url, otlp_headers_of(settings), settings.otlp_ca)
    scheme = "http" if settings.tls_cert is None else "https"
    return SpanExport(collector, SpanEncoder(resource_of(settings)), scheme, count_lost)


def resource_of(settings: Settings) -> dict[str, str]:
    """The facts about this router, by OpenTelemetry's names. What the settings say comes first, of two names of the
    service the one that is a setting of its own."""
    name = {"service.name": settings.otlp_service_name}
    ours = {"service.instance.id": f"{platform.node()}:{os.getpid()}", **name}
    is_named = "otlp_service_name" in settings.model_fields_set
    return {**ours, **pairs_in(settings.otlp_resource), **(name if is_named else {})}
