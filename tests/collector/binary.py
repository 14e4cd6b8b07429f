"""Builds a real OpenTelemetry collector from Go modules, once for each version of its sources, and runs it.

It is made of OpenTelemetry's own receiver for OTLP and its own exporter to a file: ``main.go`` only names them. Built
in two minutes; kept in pdcluster's cache, under a name made from the sources' hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from control_plane.binaries import BuildError, NotBuiltError, find_go
from patience import PATIENCE_S
from pdcluster_cli.models.tiny_model import cache_root

HERE: Final = Path(__file__).resolve().parent
NEEDED_GO: Final = (1, 25)
BUILD_LIMIT_S: Final = 3600.0
_CONFIG: Final = """\
receivers:
  otlp:
    protocols:
      http: {{endpoint: "127.0.0.1:{port}"}}
exporters:
  file: {{path: "{path}", flush_interval: 50ms}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    traces: {{receivers: [otlp], exporters: [file]}}
"""


def place() -> Path:
    """Where this version is kept; it may not be built yet."""
    sources = b"\0".join((HERE / name).read_bytes() for name in ("main.go", "go.mod", "go.sum"))
    return cache_root(os.environ) / "collector" / hashlib.sha256(sources).hexdigest()[:12]


def find_collector() -> Path:
    """The program.

    Raises:
        NotBuiltError: It is not built.
    """
    if not place().is_file():
        raise NotBuiltError("the OpenTelemetry collector is not built yet: make kube (about two minutes, once)")
    return place()


def build() -> None:
    """The program is there.

    Raises:
        BuildError: No Go, no module, or no success.
    """
    wanted = place()
    if wanted.is_file():
        return
    wanted.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=wanted.parent) as making:
        made = Path(making) / "collector"
        go = str(find_go(os.environ, NEEDED_GO))
        command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", str(made), "."]
        env = {**os.environ, "GOTOOLCHAIN": "local", "GOWORK": "off", "CGO_ENABLED": "0"}
        done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=BUILD_LIMIT_S)
        if done.returncode != 0:
            raise BuildError(f"the collector could not be built:\n{done.stderr[-2000:]}")
        made.rename(wanted)


def main() -> int:
    try:
        build()
    except BuildError as error:
        print(f"pdcluster: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def real_collector(folder: Path, port: int) -> Iterator[Path]:
    """A collector that takes OTLP at ``port`` of loopback; yields the file to which it writes what it has taken."""
    taken, config = folder / "spans.json", folder / "collector.yaml"
    config.write_text(_CONFIG.format(port=port, path=taken))
    with (folder / "collector.log").open("wb") as log:
        process = subprocess.Popen([find_collector(), "--config", f"file:{config}"], stdout=log, stderr=log)
    try:
        yield taken
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def spans_in(taken: Path, num_spans: int) -> list[dict[str, Any]]:
    """All spans in the collector's file, once it has so many, each with the attributes of its resource."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := _spans(taken)) < num_spans:
        assert time.monotonic() < deadline, f"the collector has {len(found)} spans of {num_spans}"
        time.sleep(0.05)
    return found


def _spans(taken: Path) -> list[dict[str, Any]]:
    lines = taken.read_text().splitlines(keepends=True) if taken.is_file() else []
    return [
        {**span, "attributes": _facts(span), "resource": _facts(of_one["resource"])}
        for line in lines
        if line.endswith("\n")
        for of_one in json.loads(line)["resourceSpans"]
        for scope in of_one["scopeSpans"]
        for span in scope["spans"]
    ]


def _facts(holder: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: next(iter(one["value"].values())) for one in holder.get("attributes", ())}
