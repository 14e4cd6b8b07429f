"""Real engines with TLS that asks for certificates, by hand and by the operator's own words."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fakes.certificates import FOR_CLIENTS, Authority, Issued
from fakes.mounted_secret import MountedSecret
from fakes.operator_cluster import make_pool
from integration.harness import Harness, Server, complete, eventually
from integration.prompts import LONG
from pdcluster_cli.__main__ import main
from pdcluster_cli.pod.mirror import Mirror
from pdcluster_operator.core.manifests import pool_tls
from pdcluster_operator.core.manifests.command import PodPlace
from pdcluster_operator.core.manifests.probes import drain_hook, engine_probes
from pdcluster_protocol.labels import Role


@pytest.mark.engines
@pytest.mark.slow
def test_a_pool_with_mtls_everywhere_answers_like_a_single_engine(
    harness: Harness, expected: dict[int, tuple[int, ...]], authority: Authority, tmp_path: Path
) -> None:
    ca = str(authority.ca)
    engine = authority.issue().write(tmp_path / "engine")
    ours = authority.issue(usage=FOR_CLIENTS).write(tmp_path / "client")
    inside = authority.issue().write(tmp_path / "internal")
    engine_args = [
        f"--ssl-certfile={engine['tls_cert']}",
        f"--ssl-keyfile={engine['tls_key']}",
        f"--ssl-ca-certs={ca}",
        "--ssl-cert-reqs=2",
    ]
    router_args = [
        f"--engine-ca={ca}",
        f"--engine-cert={ours['tls_cert']}",
        f"--engine-key={ours['tls_key']}",
        f"--internal-tls-cert={inside['tls_cert']}",
        f"--internal-tls-key={inside['tls_key']}",
        f"--internal-client-ca={ca}",
    ]
    connector = {
        "metaserver_ca": ca,
        "metaserver_cert": str(ours["tls_cert"]),
        "metaserver_key": str(ours["tls_key"]),
    }
    with harness.start_tls_pool(engine_args, connector, router_args) as pool:
        assert complete(pool.url, LONG, 16).token_ids == expected[len(LONG)]
        assert [line["outcome"] for line in pool.decode[0].read_trace("receive", 1)] == ["received"]


@pytest.mark.engines
def test_a_pool_by_the_operators_words_is_alive_answers_and_takes_a_second_renewal(
    harness: Harness, expected: dict[int, tuple[int, ...]], authority: Authority, tmp_path: Path
) -> None:
    """vLLM by itself would take the first renewal of a mounted Secret only."""
    asked, copies = make_pool({"spec.tls": {"secretName": "inside"}}), tmp_path / "copies"
    copies.mkdir()
    name = pool_tls.server_name(asked)
    secret = MountedSecret(tmp_path / "inside", authority, authority.issue(usage=None, names=(name,)))
    mirror = Mirror(secret.folder, copies)
    mirror.update()

    def here(word: str) -> str:
        return word.replace(pool_tls.FOLDER, str(secret.folder)).replace(pool_tls.COPY_FOLDER, str(copies))

    def status_of(command: list[str], engine: Server) -> int:
        """Exit status of a probe's or hook's command, for an engine that is not alone at its address."""
        words = [here(word) for word in command[1:]]
        words[words.index("--port") + 1] = str(urlsplit(engine.url).port)
        return main([*words, "--host", "127.0.0.1"])

    engine_args, router_args = map(here, pool_tls.engine_flags(asked)), map(here, pool_tls.router_flags(asked))
    connector = {key: here(str(value)) for key, value in pool_tls.decode_settings(asked).items()}
    with harness.start_tls_pool([*engine_args], connector, [*router_args]) as pool:
        (prefill,), (decode,) = pool.prefill, pool.decode
        assert complete(pool.url, LONG, 16).token_ids == expected[len(LONG)]
        assert [line["outcome"] for line in decode.read_trace("receive", 1)] == ["received"]
        for role, engine in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            probes = engine_probes(asked, role)
            assert status_of(probes["livenessProbe"]["exec"]["command"], engine) == 0
        assert status_of(engine_probes(asked, Role.PREFILL)["readinessProbe"]["exec"]["command"], prefill) == 0
        hook = drain_hook(asked, PodPlace.ALONE)["preStop"]["exec"]["command"]
        assert status_of([*hook, "--idle-s", "0"], decode) == 0
        for _ in range(2):
            renewed = authority.issue(usage=None, names=(name,))
            secret.publish(renewed)
            mirror.update()
            assert eventually(lambda renewed=renewed: shown_by(decode) == as_shown(renewed))  # type: ignore[misc]
        assert complete(pool.url, LONG, 16).token_ids == expected[len(LONG)]


def shown_by(engine: Server) -> bytes:
    """The certificate that a client is shown."""
    parts = urlsplit(engine.url)
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((str(parts.hostname), int(parts.port or 0))))


def as_shown(issued: Issued) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.pem.decode())
