"""The command for a lent GPU, as far as a CPU goes: it sees wrong bytes, ends what hangs, and imports nothing more."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tools.device_check import late_errors, pack
from tools.device_check.__main__ import CHECKS, ROOT, Check, run
from tools.device_check.late_errors import Report, fail_on_decode, fail_on_prefill
from tools.device_check.layers import SHAPE, push_one
from tools.device_check.pair import open_pair
from tools.device_check.reshard import Exchange, new_layer, reshard
from tools.device_check.results import Finding, Verdict, is_good, page

from fakes.async_device import AsyncRuntime
from fakes.late_errors import Kind
from pdcluster_connector.device import AcceleratorDevice, DeviceEvent, DeviceFault

CPU = torch.device("cpu")
THERE = {"torch", "numpy", "aiohttp", "pytest"}
"""What the lent machine has; with each comes what it needs itself."""
OF_THOSE = {"aiohappyeyeballs", "aiosignal", "attr", "frozenlist", "idna", "multidict", "propcache", "yarl"} | {
    *("_pytest", "pluggy", "iniconfig", "packaging", "py", "pygments"),
}
CARRIED = {"msgspec", "zmq", "mooncake"}
"""By ``pack``."""


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)])
def test_what_prefill_computes_is_on_decode_and_a_layer_that_is_not_is_named(tp: tuple[int, int]) -> None:
    with open_pair(CPU, SHAPE, tp) as pair:
        assert push_one(pair, 0) == ""
        assert "the first in layer 2" in push_one(pair, 1, left_out=2)
        assert push_one(pair, 2) == ""


class Deaf(AcceleratorDevice):
    """Takes each layer for done, also when its device says that a kernel has failed."""

    num_faults = 0

    def is_done(self, event: DeviceEvent) -> bool:
        try:
            return super().is_done(event)
        except DeviceFault:
            return True


class TellsForward(AcceleratorDevice):
    """Tells the forward thread too, as CUDA does."""

    runtime: AsyncRuntime

    def record(self) -> DeviceEvent:
        if self.runtime.late.has_failed:
            raise DeviceFault("a kernel has failed")
        return super().record()


def after_a_kernel_failed(kind: type[AcceleratorDevice]) -> Report:
    """What the check finds on the tests' device."""
    runtime, report = AsyncRuntime(), Report()
    device = kind(runtime, 1)
    if isinstance(device, TellsForward):
        device.runtime = runtime
    try:
        with open_pair(CPU, late_errors.SHAPE, late_errors.TP, device) as pair:
            fail_on_prefill(lambda _source: runtime.late.fail(Kind.STAYS), pair, report)
            runtime.release()
    finally:
        runtime.close()
    return report


def test_after_a_kernel_of_prefill_has_failed_each_push_is_lost_and_blocks_come_back() -> None:
    report = after_a_kernel_failed(AcceleratorDevice)
    assert report.wrong == []
    assert any("prefill's blocks free" in one for one in report.seen)


def test_a_rank_that_is_told_in_its_forward_pass_ends_and_the_pushes_with_it() -> None:
    report = after_a_kernel_failed(TellsForward)
    assert report.wrong == []
    assert any("the forward thread was told" in one for one in report.seen)


def test_a_rank_that_pushes_what_was_never_computed_is_found() -> None:
    """The sums of the other request end the lane, now and then before the plain one is whole: then nothing is wrong."""
    reports = (after_a_kernel_failed(Deaf) for _ in range(20))
    assert any("plain was received" in one for report in reports for one in report.wrong)


def test_a_decode_rank_that_takes_a_push_though_its_device_failed_is_found() -> None:
    """On a CPU no kernel fails late, so the push ends well, which the check must not like."""
    report = Report()
    with open_pair(CPU, late_errors.SHAPE, late_errors.TP) as pair:
        fail_on_decode(pair, report)
    assert report.wrong == ["compared was received"]


def test_what_ranks_do_not_exchange_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert reshard(CPU, new_layer((2, 1))) == ""
        monkeypatch.setattr(Exchange, "wait", lambda exchange: exchange._ends.clear())
        assert "bytes of region 0 on decode rank 0 are wrong" in reshard(CPU, new_layer((2, 1)))
    finally:
        dist.destroy_process_group()


def test_a_check_that_hangs_is_ended_at_its_limit() -> None:
    found = run(Check("hangs", "http.server", 2, ("0", "--bind", "127.0.0.1")), "cuda")
    assert (found.exit_code, found.verdict) == (None, Verdict.FAILED)
    assert "(ended at its limit)" in found.line


def test_a_check_that_fails_says_why() -> None:
    found = run(Check("fails", "json.tool", 60, ("/no/such/file",)), "cuda")
    assert found.verdict is Verdict.FAILED
    assert "No such file" in found.errors
    assert "no word" not in found.line


def test_no_check_passes_on_a_device_that_is_not_there() -> None:
    (events,) = (check for check in CHECKS if check.name == "events")
    assert run(events, "npu").verdict is Verdict.FAILED


def test_the_page_has_what_each_check_found() -> None:
    good, left = Finding("a", 0, "1\nfits\n", "noise", 1.0), Finding("b", 75, "no GPU", "", 2.0)
    bad = Finding("c", 1, "", "boom", 3.0)
    assert is_good([good, left])
    assert not is_good([good, bad])
    text = page("Title", "command", [good, left, bad])
    assert "| a | passed | 1.0 | fits |" in text
    assert "| b | left out | 2.0 | no GPU |" in text
    assert "| c | FAILED | 3.0 | boom |" in text
    assert "noise" not in text


def test_all_checks_together_take_less_than_ten_minutes() -> None:
    assert sum(check.limit_s for check in CHECKS) < 600


def test_the_checks_import_nothing_that_a_lent_machine_lacks() -> None:
    modules = [check.module for check in CHECKS if check.module != "pytest"]
    code = f"""
import sys, torch, torch.distributed, numpy
before = set(sys.modules)
for name in {modules!r}:
    __import__(name)
import mooncake.engine, contract.test_device
print(*(n for n in set(sys.modules) - before if "site-packages" in (getattr(sys.modules[n], "__file__", None) or "")))
"""
    env = {"PATH": "", "PYTHONPATH": ":".join(str(ROOT / folder) for folder in ("", "protocol", "connector", "tests"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=True)
    found = {name.split(".")[0] for name in done.stdout.split()}
    assert found >= CARRIED, "else nothing is shown"
    assert len(CARRIED) == len(pack.PACKAGES) + 1
    assert found - CARRIED - THERE - OF_THOSE == set()


def test_the_pack_takes_the_locked_packages() -> None:
    assert [re.sub("==.*", "", name) for name in pack._locked()] == list(pack.PACKAGES)


@pytest.mark.slow  # two minutes
def test_the_whole_command_runs_on_a_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tools.device_check", "--device", "cpu", "--report", str(report)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = {line.split("|")[1].strip(): line.split("|")[0].strip() for line in done.stdout.splitlines()}
    left_out = {"events", "control", "late-errors"}
    assert lines == {check.name: "left out" if check.name in left_out else "passed" for check in CHECKS}
    assert all(f"## {check.name}" in report.read_text() for check in CHECKS)
