"""The settings of spans: where they go, and the secrets that a collector wants."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.__main__ import parse_settings
from pdcluster_router.settings.router_settings import Settings
from pdcluster_router.settings.span_settings import headers_in, otlp_headers_of, pairs_in
from pdcluster_router.telemetry.span_start import resource_of

ENGINES = ["--prefill", "http://p", "--decode", "http://d"]


def settings_of(*flags: str, **environ: str) -> Settings:
    return parse_settings([*ENGINES, *flags], environ)


def sending(*flags: str, **environ: str) -> Settings:
    """The settings of a router that sends spans."""
    return settings_of(*flags, **{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", **environ})


@pytest.mark.parametrize("url", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_path_of_traces_may_be_there_or_not(url: str) -> None:
    assert settings_of("--otlp-endpoint", url).otlp_endpoint == "http://c:4318"


@pytest.mark.parametrize(
    "url", ["c:4318", "grpc://c", "http://", "http://c?key=sesame", "http://u:sesame@c", "http://c:x"]
)
def test_an_endpoint_is_a_url_without_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        settings_of("--otlp-endpoint", url)


@pytest.mark.parametrize("url", ["http://c..svc:4318", f"http://{'a' * 64}.b", "http://c/\u00e9", "http://c/a b"])
def test_an_endpoint_that_no_connection_could_be_made_to_is_refused_at_start(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        settings_of("--otlp-endpoint", url)


@pytest.mark.parametrize(
    "url",
    [
        "grpc://u:sesame@c",
        "u:sesame@c:4318",
        "http://u:sesame@",
        "collector:4318?key=sesame",
        "htps://c?key=sesame",
        "http://h..x?key=sesame",
        "http://c/a b#sesame",
        "http://key:sesame/cret@host:4318",
        "http://user:sesame\u2100@h:1",
    ],
)
def test_a_secret_in_a_url_that_is_written_otherwise_is_not_told(url: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT") as told:
        settings_of(OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert "sesame" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    ["x-key=sesame%0A", "x%0Ay=sesame", "x%20y=sesame", "x=%C3%A9sesame", "x-key:sesame==", "x%3Ay=sesame"],
)
def test_a_header_that_cannot_be_sent_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as told:
        sending(OTEL_EXPORTER_OTLP_HEADERS=text)
    assert "sesame" not in str(told.value)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "pdcluster-router"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat"}, "chat"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=chat", "OTEL_SERVICE_NAME": "talk"}, "talk"),
    ],
)
def test_a_services_name_may_be_among_the_attributes_and_its_own_variable_comes_first(
    environ: dict[str, str], name: str
) -> None:
    assert resource_of(sending(**environ))["service.name"] == name


def test_opentelemetrys_variables_hold_and_flags_come_first() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b",
        "OTEL_SERVICE_NAME": "chat",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    settings = settings_of("--trace-sample-ratio", "0.5", **environ)
    assert (settings.otlp_endpoint, settings.otlp_service_name) == ("http://c:4318", "chat")
    assert settings.trace_sample_ratio == 0.5
    assert otlp_headers_of(settings) == {"x-key": "a b"}
    assert "a%20b" not in repr(settings)


def test_a_file_of_headers_comes_before_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# ours\n\nx-key: sesame: 7 \n")
    settings = settings_of("--otlp-headers-file", str(file), OTEL_EXPORTER_OTLP_HEADERS="x-key=other")
    assert otlp_headers_of(settings) == {"x-key": "sesame: 7"}


@pytest.mark.parametrize("text", ["sesame", "a b: sesame", ": sesame", "x: ses\tame", "x: s\u00e9same"])
def test_a_line_that_is_no_header_is_told_by_its_number_alone(text: str) -> None:
    with pytest.raises(ValueError, match="line 2") as told:
        headers_in(f"x: y\n{text}")
    assert "same" not in str(told.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-headers-file .*none: No such file"):
        otlp_headers_of(settings_of("--otlp-headers-file", str(tmp_path / "none")))


@pytest.mark.parametrize("text", ["sesame", "=sesame", "a=b,sesame"])
def test_a_secret_that_is_written_otherwise_is_not_told(text: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as told:
        sending(OTEL_EXPORTER_OTLP_HEADERS=text)
    assert "sesame" not in str(told.value)


def test_pairs_are_url_encoded() -> None:
    assert pairs_in("a=b, c=d%20e ,f=") == {"a": "b", "c": "d e", "f": ""}


BAD: Final = {
    "OTEL_EXPORTER_OTLP_HEADERS": "no pair",
    "OTEL_RESOURCE_ATTRIBUTES": "no pair",
    "OTEL_TRACES_SAMPLER_ARG": "endpoint=http://jaeger",
    "OTEL_TRACES_SAMPLER": "jaeger_remote",
}
"""A value that a router cannot use."""


@pytest.mark.parametrize("name", BAD)
def test_a_variable_of_a_cluster_stops_no_router_that_sends_no_spans(name: str) -> None:
    assert settings_of(**{name: BAD[name]}).otlp_endpoint is None
    with pytest.raises(ConfigError, match=f"^{name}"):
        sending(**{name: BAD[name]})


@pytest.mark.parametrize(
    ("sampler", "ratio"),
    [("always_on", 1.0), ("parentbased_always_off", 0.0), ("traceidratio", 0.25), ("parentbased_traceidratio", 0.25)],
)
def test_the_sampler_is_that_of_opentelemetrys_variable(sampler: str, ratio: float) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c",
        "OTEL_TRACES_SAMPLER": sampler,
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
    }
    assert settings_of(**environ).trace_sample_ratio == ratio
    assert settings_of("--trace-sample-ratio", "0.5", **environ).trace_sample_ratio == 0.5
