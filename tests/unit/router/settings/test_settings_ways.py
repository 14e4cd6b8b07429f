"""A router's settings by flags, variables and a file: which of them counts, and what is said of one that is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdcluster_protocol.errors import ConfigError
from pdcluster_router.__main__ import main, parse_settings
from pdcluster_router.settings.forms import Discovery
from pdcluster_router.settings.router_settings import FLAGS, SETTINGS_VARIABLE, VARIABLES_PREFIX

IDLE = {"PDCLUSTER_ROUTER__IDLE_TIMEOUT": "0"}
ENGINES = ["--prefill=http://p:1", "--decode=http://d:1"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "router.toml"
    path.write_text('prefill = ["http://p:1", "http://p:2"]\ndecode = "http://d:1"\nidle-timeout = 1\nkeep-alive = 2\n')
    return path


def test_a_flag_counts_before_its_variable_and_that_before_the_file(file: Path) -> None:
    environ = {f"{VARIABLES_PREFIX}IDLE_TIMEOUT": "5", f"{VARIABLES_PREFIX}PROBE_TIMEOUT": "6"}
    settings = parse_settings([f"--settings={file}", "--probe-timeout=7"], environ)
    assert settings.prefill_urls == ("http://p:1", "http://p:2")
    assert settings.decode_urls == ("http://d:1",)
    assert (settings.keep_alive_s, settings.idle_timeout_s, settings.probe_timeout_s) == (2, 5, 7)


def test_the_file_may_be_named_by_its_variable(file: Path) -> None:
    assert parse_settings([], {SETTINGS_VARIABLE: str(file)}).keep_alive_s == 2
    assert parse_settings(ENGINES, {SETTINGS_VARIABLE: ""}).keep_alive_s == 15


def test_a_routers_own_variable_counts_before_one_that_others_define() -> None:
    environ = {"OTEL_SERVICE_NAME": "theirs", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    assert parse_settings(ENGINES, environ).otlp_service_name == "theirs"
    ours = {f"{VARIABLES_PREFIX}OTLP_SERVICE_NAME": "ours"}
    assert parse_settings(ENGINES, environ | ours).otlp_service_name == "ours"


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


@pytest.mark.parametrize(
    ("environ", "ratio"),
    [
        ({}, 0.5),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0),
        ({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "0.2"}, 0),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.2"}, 0.2),
        ({"OTEL_TRACES_SAMPLER": "always_on", "PDCLUSTER_ROUTER__TRACE_SAMPLE_RATIO": "0.3"}, 0.3),
        ({"OTEL_TRACES_SAMPLER": "jaeger_remote", "PDCLUSTER_ROUTER__TRACE_SAMPLE_RATIO": "0.3"}, 0.3),
    ],
)
def test_variables_of_others_count_before_the_file_and_behind_the_routers_own(
    environ: dict[str, str], ratio: float, file: Path
) -> None:
    file.write_text("trace-sample-ratio = 0.5")
    assert parse_settings([*ENGINES, f"--settings={file}"], ENDPOINT | environ).trace_sample_ratio == ratio


def test_with_the_files_endpoint_variables_of_others_count_too(file: Path) -> None:
    file.write_text("otlp-endpoint = 'http://c:4318'")
    assert parse_settings([*ENGINES, f"--settings={file}"], {"OTEL_SERVICE_NAME": "n"}).otlp_service_name == "n"
    assert parse_settings(ENGINES, {"OTEL_SERVICE_NAME": "n"}).otlp_service_name == "pdcluster-router"


def test_a_pod_may_be_told_by_variables_where_its_engines_are(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("team")
    environ = {f"{VARIABLES_PREFIX}DISCOVERY": "kubernetes", f"{VARIABLES_PREFIX}CLUSTER": "c"}
    access = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    settings = parse_settings([], environ | access, tmp_path)
    assert (settings.discovery, settings.namespace) == (Discovery.KUBERNETES, "team")


def test_what_kubernetes_tells_of_a_service_is_no_setting() -> None:
    assert parse_settings(ENGINES, {"PDCLUSTER_ROUTER_PORT": "tcp://10.0.0.1:8000"}).port == 8000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("idle-timeuot = 1", "idle-timeuot is no setting: did you mean idle-timeout?"),
        ("engine-api-key = 'k'", "engine-api-key is no setting here: VLLM_API_KEY alone gives it"),
        ("idle-timeout: 1", "it is no TOML: "),
        ("\udcff", "it is not text in UTF-8: name the file of settings"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    text: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert main([f"--settings={file}"]) == 2
    assert re.match(re.escape(f"pdcluster router: --settings {file}: {said}"), capsys.readouterr().err)


def test_a_file_that_is_not_there_and_a_value_that_is_out_of_bounds_are_told(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--settings /no/file: No such file or directory"):
        parse_settings(["--settings=/no/file"])
    file.write_text("idle-timeout = 0")
    for environ, source in (({}, f"--settings {file}: idle-timeout"), (IDLE, "PDCLUSTER_ROUTER__IDLE_TIMEOUT")):
        with pytest.raises(ConfigError, match=f"^{re.escape(source)} is '?0'?: it should be greater than 0"):
            parse_settings([*ENGINES, f"--settings={file}"], environ)
    assert parse_settings([*ENGINES, f"--settings={file}", "--idle-timeout=1"], IDLE).idle_timeout_s == 1


@pytest.mark.parametrize("path", ["", "/dev/null", "/"])
def test_what_is_no_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"^--settings {path or 'is empty'}: name a file$"):
        parse_settings([*ENGINES, f"--settings={path}"])


def test_every_flag_has_a_variable_of_its_own() -> None:
    flagged = [name for name in FLAGS.fields if name not in FLAGS.hidden]
    assert len({FLAGS.variable_of(name) for name in flagged} | {SETTINGS_VARIABLE}) == len(flagged) + 1
