"""Builds and runs a real OpenTelemetry collector.

It is made of OpenTelemetry's own receiver for OTLP and its own exporter to a file: ``main.go`` only names them.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from go_program import GoProgram
from patience import PATIENCE_S

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


COLLECTOR: Final = GoProgram("the OpenTelemetry collector", Path(__file__).resolve().parent)


def main() -> int:
    return COLLECTOR.build_or_say()


@contextmanager
def real_collector(folder: Path, port: int) -> Iterator[Path]:
    """A collector that takes OTLP at ``port`` of loopback; yields the file to which it writes what it has taken."""
    taken, config = folder / "spans.json", folder / "collector.yaml"
    config.write_text(_CONFIG.format(port=port, path=taken))
    with (folder / "collector.log").open("wb") as log:
        process = subprocess.Popen([COLLECTOR.find(), "--config", f"file:{config}"], stdout=log, stderr=log)
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
