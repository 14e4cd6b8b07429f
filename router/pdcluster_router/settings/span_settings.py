"""The router's settings for spans: each with its unit, default, bounds, and why that default.

A part of ``Settings``. Each has the environment variable that OpenTelemetry gives it, so that what a cluster sets for
all its programs holds for this one too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pdcluster_protocol.errors import ConfigError

TRACES_PATH: Final = "/v1/traces"
SPAN_VARIABLES: Final = {
    "otlp_endpoint": "OTEL_EXPORTER_OTLP_ENDPOINT",
    "otlp_headers": "OTEL_EXPORTER_OTLP_HEADERS",
    "otlp_ca": "OTEL_EXPORTER_OTLP_CERTIFICATE",
    "trace_sample_ratio": "OTEL_TRACES_SAMPLER_ARG",
    "otlp_service_name": "OTEL_SERVICE_NAME",
    "otlp_resource": "OTEL_RESOURCE_ATTRIBUTES",
}
_SAMPLER_VARIABLE: Final = "OTEL_TRACES_SAMPLER"
_RATIOS: Final = {"always_on": "1", "always_off": "0", "traceidratio": None}
"""Ratio of each sampler; None: its argument. A ``traceparent`` decides before each, as with ``parentbased_``."""
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name: RFC 9110, section 5.6.2."""
SPAN_HIDDEN: Final = frozenset(("otlp_headers",))
"""Without a flag: an argument is seen by everybody on the machine."""


def span_settings_told(
    given: Mapping[str, object], told: Mapping[str, str], environ: Mapping[str, str], *, has_endpoint: bool = False
) -> dict[str, str]:
    """``told`` by variables, without those of spans if there is no endpoint: a cluster may set them for all programs.

    ``given``: what counts before them, by flags and the router's own variables. ``has_endpoint``: something else has
    given one.

    Raises:
        ConfigError: The variables want a sampler that the router has not.
    """
    if not (has_endpoint or "otlp_endpoint" in given or "otlp_endpoint" in told):
        return {name: value for name, value in told.items() if name not in SPAN_VARIABLES}
    sampler = environ.get(_SAMPLER_VARIABLE, "")
    if not sampler or "trace_sample_ratio" in given:
        return dict(told)
    name = sampler.strip().lower().removeprefix("parentbased_")
    if name not in _RATIOS:
        raise ConfigError(
            f"{_SAMPLER_VARIABLE} is {sampler!r}, and the router has {', '.join(_RATIOS)} and parentbased_ before "
            "them: set one of these, or give --trace-sample-ratio"
        )
    ratio = _RATIOS[name]
    return {**told, **({"trace_sample_ratio": ratio} if ratio else {})}


def _checked_endpoint(url: str) -> str:
    said = "it" if set(url) & set("@?#") else repr(url)  # Around these there may be a secret.
    parts = _split(url)
    if parts is None or not parts.hostname:
        raise ValueError(f"{said} is not a URL like http://HOST:4318")
    if not _is_host(parts.hostname) or not _is_visible(parts.path):
        raise ValueError(f"{said} has a host or a path that no connection can be made to: see its dots and spaces")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError("it has a user, a query or a fragment: give secrets in --otlp-headers-file")
    path = parts.path.rstrip("/").removesuffix(TRACES_PATH)
    return f"{parts.scheme}://{parts.netloc}{path}"


def _split(url: str) -> SplitResult | None:
    """The parts of a URL that may be used; None: it may not. The library's own errors may quote a secret."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        return None
    return parts if is_usable else None


def _is_host(name: str) -> bool:
    """Whether it can be looked up: each label has 1 to 63 characters."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def _is_visible(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def pairs_in(text: str) -> dict[str, str]:
    """The pairs of ``name=value,name=value``, as OpenTelemetry writes headers and attributes: values are URL-encoded.

    Example: ``a=b,c=d%20e`` -> ``a``: ``b``, ``c``: ``d e``.

    Raises:
        ValueError: It is written otherwise. The message has no part of it, for it may be a secret.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() and sign for name, sign, _ in pairs):
        raise ValueError("it should be NAME=VALUE, with commas between them")
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


def headers_in(text: str) -> dict[str, str]:
    """The headers of a file with ``name: value`` lines. Empty lines, and those that begin with #, are no headers.

    Raises:
        ValueError: A line is no header. The message has its number, and no part of it.
    """
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, sign, value = (part.strip() for part in line.partition(":"))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not (name and sign and _is_header(name, value)):
            raise ValueError(f"line {number} is not NAME: VALUE in printable ASCII")
        headers[name] = value
    return headers


def _is_header(name: str, value: str) -> bool:
    return _TOKEN.fullmatch(name) is not None and value.isascii() and value.isprintable()


def _checked_headers(text: str) -> str:
    if not all(_is_header(name, value) for name, value in pairs_in(text).items()):
        raise ValueError(
            "it has a header that is not NAME=VALUE in printable ASCII: see for a line's end, as %0A, in its values, "
            "and for a colon in its names"
        )
    return text


def _checked_pairs(text: str) -> str:
    pairs_in(text)
    return text


OtlpUrl = Annotated[str, AfterValidator(_checked_endpoint)]
Pairs = Annotated[str, AfterValidator(_checked_pairs)]
HeaderPairs = Annotated[str, AfterValidator(_checked_headers)]


class SpanSettings(BaseModel):
    """The destination of spans, and the requests that get them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    otlp_endpoint: OtlpUrl | None = None
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP, as http://collector:4318: /v1/traces is put
    behind it. The router then sends spans of its requests there, and engines' own spans become their children. Needs
    the packages of pdcluster[otlp]. None: no spans, and ``traceparent`` goes to engines as it came."""
    otlp_headers_file: Path | None = None
    """File with a NAME: VALUE line for each header that the collector wants, such as a key: read at start. None: those
    of $OTEL_EXPORTER_OTLP_HEADERS, if there are any."""
    otlp_headers: HeaderPairs | None = Field(default=None, repr=False)
    """Headers that the collector wants, as NAME=VALUE with commas between them. None: none."""
    otlp_ca: Path | None = None
    """PEM file with the authorities that the collector's certificate is trusted by. None: those of this system."""
    otlp_service_name: str = "pdcluster-router"
    """Name of this service in its spans. pdcluster-router: one name for all routers."""
    otlp_resource: Pairs = ""
    """Further facts about this router in its spans, as NAME=VALUE with commas between them: its pod, its zone. Nothing
    by default."""
    trace_sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Part of the requests without ``traceparent`` that get spans. Those with one are as their caller decided. 1: a
    few requests a second, of which each is to be seen. A sampled request costs the router about as much as another
    request, beside it in a thread: give 0.01 at 100 requests a second and more."""


def otlp_headers_of(settings: SpanSettings) -> dict[str, str]:
    """The headers for the collector.

    Raises:
        ConfigError: The file cannot be read, or has a line that is no header.
    """
    path = settings.otlp_headers_file
    if path is None:
        return pairs_in(settings.otlp_headers or "")
    try:
        return headers_in(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--otlp-headers-file {path}: {reason}") from error
