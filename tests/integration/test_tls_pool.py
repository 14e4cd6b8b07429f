"""Real engines with TLS that asks for certificates, and a router whose internal port asks too."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.certificates import FOR_CLIENTS, Authority
from integration.harness import Harness, complete
from integration.prompts import LONG


@pytest.mark.engines
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
        assert [line["outcome"] for line in pool.decode[0].read_trace("receive")] == ["received"]
