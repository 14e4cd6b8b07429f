"""The script of ``helm test``, run as in its pod, against a server that answers as told."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from chart_cases.rendering import CHART
from patience import PATIENCE_S

LISTS = {
    f"/apis/pdcluster.dev/v1alpha1/namespaces/ns/{plural}?limit=1": (200, f'{{"kind": "{kind}List"}}')
    for plural, kind in (("pdclusters", "PDCluster"), ("pdrolescalers", "PDRoleScaler"))
}
READY = {"/readyz": (200, "ok")}


@contextmanager
def serving(answers: dict[str, tuple[int, str]], tokens: list[str]) -> Iterator[str]:
    """A server on loopback; ``tokens`` collects what callers show of themselves."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, "no such page"))
            tokens.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
            """Nothing: the test's output is the script's."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="fake-api")
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def check(url: str, account: Path) -> subprocess.CompletedProcess[str]:
    given = {"API_URL": url, "OPERATOR_URL": url, "NAMESPACE": "ns", "ACCOUNT_FOLDER": str(account), "DEADLINE_S": "0"}
    command = [sys.executable, str(CHART / "files" / "check_install.py")]
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=PATIENCE_S)


def test_it_passes_when_the_kinds_are_known_and_the_operator_is_ready(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("who-i-am\n")
    tokens: list[str] = []
    with serving(LISTS | READY, tokens) as url:
        done = check(url, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the operator is ready" in done.stdout
    assert tokens == ["Bearer who-i-am", "Bearer who-i-am", ""], "the token is for the API server alone"


def test_it_fails_when_the_kinds_are_unknown_and_says_what_helps(tmp_path: Path) -> None:
    with serving(READY, []) as url:
        done = check(url, tmp_path)
    assert done.returncode == 1
    assert "no list of pdclusters (HTTP Error 404" in done.stderr
    assert "crds.enabled=true" in done.stderr


def test_it_blames_the_crds_only_where_the_kinds_are_unknown(tmp_path: Path) -> None:
    with serving({**READY, **dict.fromkeys(LISTS, (403, "no"))}, []) as url:
        done = check(url, tmp_path)
    assert done.returncode == 1
    assert "no list of pdclusters (HTTP Error 403" in done.stderr
    assert "crds" not in done.stderr


def test_it_fails_when_the_operator_is_not_ready(tmp_path: Path) -> None:
    with serving({**LISTS, "/readyz": (503, "no list yet")}, []) as url:
        done = check(url, tmp_path)
    assert done.returncode == 1
    assert "the operator is not ready (HTTP Error 503" in done.stderr


def test_it_fails_when_nobody_answers(tmp_path: Path) -> None:
    done = check("http://127.0.0.1:1", tmp_path)
    assert done.returncode == 1
    assert "Connection refused" in done.stderr
