"""Engines come and go in a file while requests run: nobody is cut."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import FakeEngine, Wire
from fakes.faults import Gate
from fakes.kube_rig import FoundRig, num_seen
from fakes.router import post, running_server, send, until
from pdcluster_protocol.pool_page import POOL_PATH

pytestmark = pytest.mark.anyio


@dataclass
class FileRig(FoundRig):
    """A ``Rig`` whose engines stand in a file."""

    path: Path = Path()

    def name(self, *engines: FakeEngine, revision: str = "") -> None:
        """These engines stand in the file from now on, and no others."""
        self.write("".join(f"{self.role_of(engine)} {engine.url} {revision}\n" for engine in engines))

    def write(self, text: str) -> None:
        """The file has this content from now on; nothing sees half of it."""
        aside = self.path.with_suffix(".new")
        aside.write_text(text)
        aside.rename(self.path)

    def role_of(self, engine: FakeEngine) -> str:
        return "prefill" if engine in self.prefills else "decode"


@asynccontextmanager
async def running_file_rig(path: Path, *, pairs: int = 1, **settings: Any) -> AsyncIterator[FileRig]:
    """A router that has started with a file of one pair, of several that run."""
    wire = Wire()
    prefills, decodes = ([FakeEngine(wire) for _ in range(pairs)] for _ in range(2))
    for engine in (*prefills, *decodes):
        await engine.start()
    path.write_text(f"prefill {prefills[0].url}\ndecode {decodes[0].url}\n")
    found = {"discovery": "file", "engines_file": path, "engines_file_interval_s": 0.01}
    async with running_server(**{**found, **settings}) as (server, url):
        rig = FileRig(server, url, prefills=prefills, decodes=decodes, path=path)
        yield rig
        await rig.settled()
    for engine in (*prefills, *decodes):
        await engine.stop()


async def discovery_of(rig: FileRig) -> dict[str, Any]:
    page = (await (await rig.internal()).get(POOL_PATH)).json()
    return dict(page["discovery"])


async def test_the_engines_of_the_file_serve_from_the_start(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines") as rig:
        assert (await post(rig)).status == 200
        assert await discovery_of(rig) == {"kind": "file", "is_current": True, "reason": ""}
        assert await rig.metric("pdcluster_router_discovery_up") == 1


async def test_an_engine_that_is_named_gets_work_and_one_that_is_no_more_finishes_what_it_has(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2) as rig:
        old, new = (rig.prefills[0], rig.decodes[0]), (rig.prefills[1], rig.decodes[1])
        old[1].close_gate(Gate.ANSWER)
        running = await send(rig)
        await until(lambda: len(old[1].seen) == 1)
        rig.name(*new)
        await rig.usable(*new)
        await rig.becomes(old[1], "leaving")
        for _ in range(4):
            assert (await post(rig)).status == 200
        assert num_seen(*old, *new) == [1, 1, 4, 4]
        old[1].open_gate(Gate.ANSWER)
        assert (await running.receive()).status == 200
        await rig.becomes(old[1], "")


async def test_the_last_prefill_engine_of_a_revision_still_prefills_what_its_decode_engines_have(
    tmp_path: Path,
) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2, on_prefill_failure="fail") as rig:
        (old_prefill, new_prefill), (old_decode, new_decode) = rig.prefills, rig.decodes
        old_decode.close_gate(Gate.RESERVE)
        running = await send(rig)
        await until(lambda: len(old_decode.seen) == 1)
        rig.name(new_prefill, new_decode, revision="revision=b")
        await rig.becomes(old_decode, "leaving")
        assert rig.state(old_prefill) == "finishing"
        await rig.usable(new_prefill, new_decode)
        assert (await post(rig)).status == 200
        old_decode.open_gate(Gate.RESERVE)
        assert (await running.receive()).status == 200
        assert num_seen(old_prefill, old_decode, new_prefill, new_decode) == [1, 1, 1, 1]


async def test_such_an_engine_is_forgotten_when_no_request_can_want_it_any_more(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2) as rig:
        old_prefill, old_decode = rig.prefills[0], rig.decodes[0]
        old_decode.close_gate(Gate.ANSWER)
        running = await send(rig)
        await until(lambda: len(old_decode.seen) == 1)
        rig.name(rig.prefills[1], rig.decodes[1], revision="revision=b")
        await rig.becomes(old_prefill, "finishing")
        old_decode.open_gate(Gate.ANSWER)
        assert (await running.receive()).status == 200
        await rig.becomes(old_prefill, "")


async def test_such_an_engine_is_forgotten_after_the_longest_time_of_a_request(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2, first_byte_timeout_s=0.5) as rig:
        (old_prefill, new_prefill), (decode, _) = rig.prefills, rig.decodes
        rig.name(new_prefill, decode)
        await rig.usable(new_prefill)
        await rig.becomes(old_prefill, "")


async def test_revisions_of_a_file_are_not_mixed(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2) as rig:
        (a_prefill, b_prefill), (a_decode, b_decode) = rig.prefills, rig.decodes
        rig.write(
            f"prefill {a_prefill.url}\nprefill {b_prefill.url} revision=b\n"
            f"decode {a_decode.url}\ndecode {b_decode.url} revision=b\n"
        )
        await rig.usable(a_prefill, b_prefill, a_decode, b_decode)
        for _ in range(8):
            assert (await post(rig)).status == 200
        assert num_seen(a_prefill) == num_seen(a_decode)
        assert num_seen(b_prefill) == num_seen(b_decode)
        assert sum(num_seen(a_decode, b_decode)) == 8


@pytest.mark.parametrize("text", ["", "decode http://d:1\n", "prefill secret\n", "secret", "\udcff"])
async def test_a_file_that_cannot_be_used_changes_no_engine(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_file_rig(tmp_path / "engines") as rig:
        rig.path.write_bytes(text.encode(errors="surrogateescape"))
        await until(lambda: any("engines not changed reason=--engines-file" in line for line in caplog.messages))
        assert (await post(rig)).status == 200
        said = await discovery_of(rig)
        assert said["is_current"] is False
        assert str(rig.path) in said["reason"]
        assert "http://" not in said["reason"]
        assert await rig.metric("pdcluster_router_discovery_up") == 0
        assert await rig.metric("pdcluster_router_discovery_failures_total") >= 1
        rig.name(*rig.prefills, *rig.decodes)
        await until(lambda: any("engines file read engines=2" in line for line in caplog.messages))
        assert await discovery_of(rig) == {"kind": "file", "is_current": True, "reason": ""}


async def test_a_file_that_is_gone_changes_no_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_file_rig(tmp_path / "engines") as rig:
        rig.path.unlink()
        await until(lambda: any("No such file or directory" in line for line in caplog.messages))
        assert (await post(rig)).status == 200


async def test_a_hangup_has_the_file_read_at_once(tmp_path: Path) -> None:
    async with running_file_rig(tmp_path / "engines", pairs=2, engines_file_interval_s=3600) as rig:
        rig.name(*rig.prefills, *rig.decodes)
        with rig.server.capture_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await rig.usable(*rig.prefills, *rig.decodes)


REFUSED = {
    "": "--engines-file: --discovery file needs it",
    "--engines-file FILE --prefill http://p:1": "--prefill: engines are found, not named, with --discovery file",
    "--engines-file FILE --discovery static": "--engines-file FILE: --discovery is static, give ",
    "--engines-file FILE": "--engines-file FILE: line 1 names no engine: write prefill or decode, ",
    "--engines-file FILE.no": "--engines-file FILE.no: No such file or directory: name a file that ",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_router_does_not_start_with_a_file_that_it_cannot_use(flags: str, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("x\n")
    argv = flags.replace("FILE", str(path)).split()
    router = [sys.executable, "-m", "pdcluster_router", "--port", "0", "--discovery", "file", *argv]
    ended = subprocess.run(router, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("pdcluster router: ")
    assert REFUSED[flags].replace("FILE", str(path)) in ended.stderr
