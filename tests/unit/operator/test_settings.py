"""The operator's settings and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdcluster_kube.access import KubeAccess
from pdcluster_operator.__main__ import main, parse_settings
from pdcluster_operator.settings import Settings
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.logs import LogFormat

FLAGS = ["--router-image", "r:1", "--kube-api", "https://api:6443", "--lease-namespace", "system"]
NOWHERE = Path("/nowhere")


def settings_of(*flags: str) -> Settings:
    return parse_settings([*FLAGS, *flags], {}, NOWHERE)


def test_flags_become_settings() -> None:
    settings = settings_of("--namespace", "a", "--namespace", "b", "--resync", "60", "--workers", "3", "--port", "0")
    assert settings.namespaces == ("a", "b")
    assert (settings.resync_s, settings.workers, settings.port) == (60.0, 3, 0)
    assert settings_of("--api-server-port", "443", "--api-server-port", "16443").api_server_ports == (443, 16443)
    assert settings_of().api_server_ports == (443, 6443)
    assert settings.access == KubeAccess("https://api:6443")


def test_two_processes_on_one_host_are_two_candidates() -> None:
    assert settings_of().identity != settings_of().identity


def test_a_pod_knows_its_api_server_and_namespace(tmp_path: Path) -> None:
    for name in ("namespace", "token", "ca.crt"):
        (tmp_path / name).write_text("mine\n")
    environ = {
        "KUBERNETES_SERVICE_HOST": "fd00::1",
        "KUBERNETES_SERVICE_PORT": "6443",
    }
    settings = parse_settings(["--router-image=own:2"], environ, tmp_path)
    assert settings.kube_api == "https://[fd00::1]:6443"
    assert settings.kube_token_file == tmp_path / "token"
    assert settings.kube_ca_file == tmp_path / "ca.crt"
    assert settings.lease_namespace == "mine"


def test_another_api_server_never_gets_the_pods_own_token(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("mine")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    settings = parse_settings(["--kube-api", "https://other:1", "--router-image=own:2"], environ, tmp_path)
    assert settings.kube_token_file is None
    assert settings.lease_namespace == "mine"


def test_the_logs_form_is_the_flags_or_the_variables() -> None:
    environ = {"PDCLUSTER_LOG_FORMAT": "json"}
    assert parse_settings(FLAGS, environ, NOWHERE).log_format is LogFormat.JSON
    assert parse_settings([*FLAGS, "--log-format=text"], environ, NOWHERE).log_format is LogFormat.TEXT
    with pytest.raises(ConfigError, match="--log-format"):
        parse_settings(FLAGS, {"PDCLUSTER_LOG_FORMAT": "yaml"}, NOWHERE)


@pytest.mark.parametrize("flags", [["--kubeconfig", "k"], ["--context", "c"]])
def test_a_kubeconfig_that_is_named_counts_before_the_pods_own_access(flags: list[str], tmp_path: Path) -> None:
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": "of-the-shell"}
    settings = parse_settings([*flags, "--lease-namespace=a", "--router-image=own:2"], environ, tmp_path)
    assert settings.access is None
    expected = ("k", None) if flags[0] == "--kubeconfig" else ("of-the-shell", "c")
    assert (settings.kubeconfig, settings.kube_context) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kube-api", "http://api:80"], "--kube-api: .* would send the token in the clear"),
        (["--lease-renew", "20"], "give a duration above the renewal"),
        (["--lease-retry", "9"], "a renewal of two retries"),
        (["--workers", "0"], "--workers"),
        (["--api-server-port", "0"], "--api-server-port is '?0'?: it should be greater"),
        (["--namespace", "Not_A_Name"], "--namespace is 'Not_A_Name': it should match"),
        (["--verify-timeout", "500"], "--verify-timeout"),
    ],
)
def test_what_cannot_work_is_refused_by_the_flags_name(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(*flags)


def test_outside_of_a_pod_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--router-image", "r:1", "--lease-namespace", "x"]) == 2
    assert "there is no kubeconfig" in capsys.readouterr().err
