"""The routers that ``router_peers`` compares, and their commands. The flags are those of the versions below.

nginx 1.22          a plain reverse proxy: the floor of what relaying costs
vllm-router 0.1.17  Rust; P/D: prefill first, then decode, which pulls
sglang-router 0.3.2 Rust; P/D: both engines at once
pdcluster           P/D: decode first, which reserves blocks; prefill then pushes
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from benchmarks.client import BenchmarkError
from benchmarks.router import LOCAL, PAIR, PATH

SETUP: Final = ".venv/bin/uv pip install --no-deps --require-hashes -r requirements/router-peers.lock"
OURS: Final = "pdcluster"
START_TIMEOUT_S: Final = 60.0


class Flow(StrEnum):
    """The way of a request through the router."""

    ONE_HOP = "one hop"
    PREFILL_DECODE = "P/D"


@dataclass(frozen=True, slots=True)
class Contender:
    """A router in one of its flows. ``module``: its Python module, or empty if ``program`` is set. ``flags``: more of
    them, for ours."""

    name: str
    flow: Flow
    module: str = ""
    program: str = ""
    flags: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        return shutil.which(self.program) is not None if self.program else find_spec(self.module) is not None

    @property
    def body(self) -> bytes:
        """A request that takes this flow. Our router sends ``LOCAL`` to decode alone: it asks for an echo."""
        return LOCAL if self.flow is Flow.ONE_HOP else PAIR


CONTENDERS: Final = (
    Contender(OURS, Flow.ONE_HOP, module="pdcluster_router"),
    Contender("nginx", Flow.ONE_HOP, program="nginx"),
    Contender("vllm-router", Flow.ONE_HOP, module="vllm_router"),
    Contender("sglang-router", Flow.ONE_HOP, module="sglang_router"),
    Contender(OURS, Flow.PREFILL_DECODE, module="pdcluster_router"),
    Contender("vllm-router", Flow.PREFILL_DECODE, module="vllm_router"),
    Contender("sglang-router", Flow.PREFILL_DECODE, module="sglang_router"),
)


@dataclass(frozen=True, slots=True)
class Running:
    """A router that answers. ``pid``: its process, whose threads do all the work."""

    contender: Contender
    url: str
    pid: int


@contextmanager
def running(contender: Contender, engines: Sequence[str], ports: Sequence[int]) -> Iterator[Running]:
    """The router answers until the block ends. ``ports``: two free ports.

    Raises:
        BenchmarkError: The router ended, or does not answer within ``START_TIMEOUT_S``.
    """
    url = f"http://127.0.0.1:{ports[0]}"
    with tempfile.TemporaryDirectory(prefix="router-peers-") as folder, Path(folder, "log").open("wb") as log:
        argv = command(contender, engines, ports, Path(folder))
        process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=folder)
        try:
            _wait(contender, process, url, Path(folder, "log"))
            yield Running(contender, url, _working_pid(contender, process.pid))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def command(contender: Contender, engines: Sequence[str], ports: Sequence[int], folder: Path) -> list[str]:
    """The command line of the router. If it has roles, the first half of ``engines`` is prefill's."""
    if contender.program:
        (folder / "nginx.conf").write_text(nginx_conf(engines, ports[0], folder))
        return [contender.program, "-c", str(folder / "nginx.conf"), "-g", "daemon off;"]
    half, port = len(engines) // 2, str(ports[0])
    given = (("--prefill", engines[:half]), ("--decode", engines[half:]))
    roles = [word for flag, urls in given for url in urls for word in (flag, url)]
    if contender.name == OURS:
        own = [*roles, "--port", port, "--internal-port", str(ports[1]), *contender.flags]
        return [sys.executable, "-m", contender.module, *own]
    common = ["--host", "127.0.0.1", "--port", port, "--prometheus-port", str(ports[1]), "--log-level", "error"]
    common += ["--policy", "round_robin"]
    if contender.flow is Flow.ONE_HOP:
        words = ["--worker-urls", *engines]
    else:
        words = ["--vllm-pd-disaggregation" if contender.module == "vllm_router" else "--pd-disaggregation", *roles]
    return [sys.executable, "-m", f"{contender.module}.launch_router", *common, *words]


def nginx_conf(engines: Sequence[str], port: int, folder: Path) -> str:
    """One worker, no log of requests, answers relayed as they come, connections kept."""
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in engines)
    return f"""
pid {folder}/nginx.pid;
error_log {folder}/error.log;
worker_processes 1;
worker_rlimit_nofile 65536;
events {{ worker_connections 16384; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_max_body_size 16m; client_body_buffer_size 1m; keepalive_requests 1000000000; tcp_nodelay on;
  upstream engines {{ {servers} keepalive 512; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def _wait(contender: Contender, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchmarkError(f"{contender.name} ended with {process.returncode}: {log.read_text()[-2000:]}")
        request = urllib.request.Request(url + PATH, data=contender.body, headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise BenchmarkError(f"{contender.name} does not answer after {START_TIMEOUT_S:.0f} s: {log.read_text()[-2000:]}")


def _working_pid(contender: Contender, pid: int) -> int:
    """The process that relays: for nginx a child."""
    if not contender.program:
        return pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
