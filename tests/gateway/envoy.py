"""A real Envoy, set up as `docs/gateway-envoy.yaml` says, with the ports of a test.

Its wheel has a folder of its own (`packages.py`): it brings a Python package `envoy`, as other distributions do.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from fakes.http import Message, RawClient
from fakes.router import COMPLETIONS
from gateway.packages import folder_with
from gateway.picker_tls import PickerTls
from integration.ports import fresh_port
from patience import PATIENCE_S

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = ROOT / "docs" / "gateway-envoy.yaml"
DUPLEX: Final = "FULL_DUPLEX_STREAMED"
SUBSET_HEADER: Final = "x-subset"
"""In tests: Envoy makes the metadata of a subset of it."""


def find_envoy() -> Path:
    """The program."""
    return folder_with("gateway.lock") / "envoy" / "_bin" / "envoy"


@dataclass
class Envoy:
    """A gateway that takes clients at ``url``."""

    url: str
    process: asyncio.subprocess.Process
    log: Path

    async def client(self) -> RawClient:
        return await RawClient.connect(self.url)

    async def ask(self, body: object, path: str = COMPLETIONS, headers: dict[str, str] | None = None) -> Message:
        """The answer to one request on a connection of its own."""
        async with asyncio.timeout(PATIENCE_S):
            return await (await self.client()).post(path, body, headers)


@asynccontextmanager
async def running_envoy(picker_port: int, decode_urls: Sequence[str], **changes: Any) -> AsyncIterator[Envoy]:
    """An Envoy before these engines; at the end it has ended. ``changes``: as ``config_for``."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), fresh_port()
        config = folder / "envoy.yaml"
        config.write_text(yaml.safe_dump(config_for(port, picker_port, decode_urls, **changes)))
        with (folder / "log").open("wb") as log:
            # Hot restarts share a number of the machine, which other Envoys may have.
            options = ["--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
            process = await asyncio.create_subprocess_exec(find_envoy(), "-c", config, *options, stderr=log, stdout=log)
        try:
            await _until_it_listens(port, process, folder / "log")
            yield Envoy(f"http://127.0.0.1:{port}", process, folder / "log")
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def config_for(
    port: int,
    picker_port: int,
    decode_urls: Sequence[str],
    *,
    fails_open: bool = False,
    has_picker: bool = True,
    has_subsets: bool = False,
    message_timeout_s: float | None = None,
    picker_tls: PickerTls | None = None,
    **modes: str,
) -> dict[str, Any]:
    """The page's example with these ports. ``modes``: of ``processing_mode``. ``has_subsets``: a subset is what a
    client's header ``SUBSET_HEADER`` says. ``picker_tls``: the picker is asked so; None: in the clear."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    resources = config["static_resources"]
    _set_port(resources["listeners"][0], port)
    picker, decode = resources["clusters"]
    _set_port(picker["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"], picker_port)
    decode["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": int(url.split(":")[-1])}}}}
        for url in decode_urls
    ]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    asks = manager["http_filters"][0]["typed_config"]
    asks["failure_mode_allow"] = fails_open
    asks["processing_mode"].update(modes)
    asks["message_timeout"] = f"{PATIENCE_S if message_timeout_s is None else message_timeout_s}s"
    if has_subsets:
        manager["http_filters"].insert(0, _SUBSETS)
    if picker_tls is not None:
        picker_tls.add_to(picker)
    if not has_picker:
        manager["http_filters"] = manager["http_filters"][-1:]
    return config


def _set_port(holder: dict[str, Any], port: int) -> None:
    holder["address"]["socket_address"]["port_value"] = port


_SUBSETS: Final = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": SUBSET_HEADER,
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                },
            }
        ],
    },
}


async def _until_it_listens(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            assert process.returncode is None, log.read_text()
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.02)
