"""What follows from the facts of a machine, as tables; each problem is one line with both values and the cure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from pdcluster_connector.self_test.judging import (
    OLDEST_MOONCAKE,
    AscendFacts,
    EventVerdict,
    Look,
    MooncakeFacts,
    Patience,
    ascend_problems,
    count_for,
    events_problem,
    judge,
    mooncake_problem,
)

ROOT: Final = Path(__file__).resolve().parents[4]
PLAIN: Final = "mooncake-transfer-engine"
CUDA_13: Final = f"{PLAIN}-cuda13"
NPU: Final = f"{PLAIN}-npu"
NON_CUDA: Final = f"{PLAIN}-non-cuda"


@pytest.mark.parametrize(
    ("name", "version", "device", "cuda"),
    [
        (PLAIN, "0.3.13.post1", "cuda", "12.9"),
        (CUDA_13, "0.3.14", "cuda", "13.0"),
        (NPU, "0.3.13.post1", "npu", ""),
        (NON_CUDA, "0.3.13.post1", "cpu", ""),
        (NON_CUDA, OLDEST_MOONCAKE, "cpu", ""),
        (NON_CUDA, "0.3.13", "cpu", ""),
        (NON_CUDA, "0.4.0rc1", "cpu", ""),
        (NON_CUDA, "1.0+local", "cpu", ""),
        (PLAIN, "0.3.13.post1", "cpu", ""),  # it can be loaded where CUDA's libraries are, and moves memory of the host
        (CUDA_13, "0.3.14", "cuda", ""),  # PyTorch does not say its CUDA
        (f"{PLAIN}-of-a-vendor", "0.3.14", "cuda", "13.0"),
        (NON_CUDA, "0.3.14", "tpu", ""),
    ],
)
def test_a_mooncake_that_fits_is_no_problem(name: str, version: str, device: str, cuda: str) -> None:
    assert mooncake_problem(MooncakeFacts(((name, version),), device, cuda)) == ""


@pytest.mark.parametrize(
    ("builds", "device", "cuda", "problem"),
    [
        (
            (),
            "npu",
            "",
            f"no build of Mooncake is installed by pip, one of 0.3.12.post1 or later is needed: pip install {NPU}",
        ),
        (
            ((PLAIN, "0.3.13.post1"), (CUDA_13, "0.3.14")),
            "cuda",
            "13.0",
            f"{PLAIN} 0.3.13.post1 and {CUDA_13} 0.3.14 are both installed and overwrite each other's folder mooncake: "
            f"pip uninstall -y {PLAIN} {CUDA_13}, then pip install {CUDA_13}",
        ),
        (
            ((PLAIN, "0.3.11.post1"),),
            "cuda",
            "12.9",
            f"{PLAIN} is 0.3.11.post1, 0.3.12.post1 or later is needed: pip install -U {PLAIN}",
        ),
        (
            ((NON_CUDA, "0.3.12"),),
            "cpu",
            "",
            f"{NON_CUDA} is 0.3.12, 0.3.12.post1 or later is needed: pip install -U {NON_CUDA}",
        ),
        (
            ((PLAIN, "0.3.13.post1"),),
            "cuda",
            "13.0",
            f"{PLAIN} is for CUDA 12, PyTorch here is for CUDA 13.0: pip uninstall -y {PLAIN}, then "
            f"pip install {CUDA_13}",
        ),
        (
            ((CUDA_13, "0.3.14"),),
            "cuda",
            "12.9",
            f"{CUDA_13} is for CUDA 13, PyTorch here is for CUDA 12.9: pip uninstall -y {CUDA_13}, then "
            f"pip install {PLAIN}",
        ),
        (
            ((NON_CUDA, "0.3.14"),),
            "cuda",
            "13.0",
            f"{NON_CUDA} is for device type cpu, this engine's is cuda: pip uninstall -y {NON_CUDA}, then pip install "
            f"{CUDA_13}",
        ),
        (
            ((CUDA_13, "0.3.14"),),
            "npu",
            "",
            f"{CUDA_13} is for device type cuda, this engine's is npu: pip uninstall -y {CUDA_13}, then "
            f"pip install {NPU}",
        ),
        (
            ((NPU, "0.3.14"),),
            "cuda",
            "14.1",
            f"{NPU} is for device type npu, this engine's is cuda: pip uninstall -y {NPU}, then pip install the one of "
            f"{PLAIN}, {CUDA_13}, {NPU}, {NON_CUDA} for this device",
        ),
    ],
)
def test_a_mooncake_that_does_not_fit_is_named_with_its_cure(
    builds: tuple[tuple[str, str], ...], device: str, cuda: str, problem: str
) -> None:
    assert mooncake_problem(MooncakeFacts(builds, device, cuda)) == problem


def test_an_image_is_built_with_the_same_oldest_mooncake() -> None:
    program = "import engine_checks; print(engine_checks.OLDEST_MOONCAKE)"
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "images", capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == OLDEST_MOONCAKE


GOOD: Final = AscendFacts("", (), 10001, "pdcluster")


def test_an_ascend_machine_with_all_that_is_needed_has_no_problem() -> None:
    assert ascend_problems(GOOD) == ()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            AscendFacts("", ("libhccl.so", "libgraph.so"), 10001, "pdcluster"),
            r"CANN's environment is not in effect, 2 of 7 libraries .*\(libhccl.so, libgraph.so\): .*set_env.sh",
        ),
        (
            AscendFacts("No such file or directory", (), 10001, "pdcluster"),
            r"/etc/hccn.conf cannot be read \(No such file or directory\), .* answers are wrong: mount the node's",
        ),
        (AscendFacts("", (), 10001, ""), r"user id 10001 has no line in /etc/passwd, .*: add it to the image"),
    ],
)
def test_what_an_ascend_machine_lacks_is_named_with_its_cure(facts: AscendFacts, said: str) -> None:
    (problem,) = ascend_problems(facts)
    assert re.match(said, problem)
    assert "\n" not in problem


def test_all_that_an_ascend_machine_lacks_is_named_at_once() -> None:
    assert len(ascend_problems(AscendFacts("it is empty", ("libhccl.so",), 7, ""))) == 3


NOT_YET: Final = (False, False)
"""The event's answer, then memory's."""
LATE: Final = (False, True)
DONE: Final = (True, True)
LIE: Final = (True, False)
PATIENCE: Final = Patience(late_s=10, work_s=60)


@pytest.mark.parametrize(
    ("looks", "verdict"),
    [
        ([(0.0, NOT_YET)], EventVerdict.GO_ON),
        ([(0.0, NOT_YET), (0.1, DONE)], EventVerdict.HONEST),
        ([(0.0, NOT_YET), (0.1, LATE), (0.2, DONE)], EventVerdict.HONEST),
        ([(0.0, NOT_YET), (59.9, NOT_YET)], EventVerdict.GO_ON),
        ([(0.0, NOT_YET), (59.9, DONE)], EventVerdict.HONEST),  # slow
        ([(50.0, NOT_YET), (61.0, NOT_YET)], EventVerdict.STUCK),
        ([(50.0, NOT_YET), (61.0, DONE)], EventVerdict.HONEST),  # slower than that, and through at last
        ([(0.0, DONE)], EventVerdict.UNSEEN),  # fast, or a host that came late
        ([(30.0, DONE)], EventVerdict.UNSEEN),
        ([(0.0, LATE), (0.1, DONE)], EventVerdict.UNSEEN),
        ([(0.0, LIE)], EventVerdict.EARLY),
        ([(0.0, NOT_YET), (0.1, LIE)], EventVerdict.EARLY),
        ([(0.0, NOT_YET), (0.1, LATE)], EventVerdict.GO_ON),
        ([(0.0, NOT_YET), (55.0, LATE), (64.9, LATE)], EventVerdict.GO_ON),  # its time begins with what is in memory
        ([(0.0, NOT_YET), (55.0, LATE), (65.1, LATE)], EventVerdict.NEVER),
        ([(0.0, NOT_YET), (55.0, LATE), (65.1, DONE)], EventVerdict.HONEST),
    ],
)
def test_an_event_is_judged_by_memory(looks: list[tuple[float, tuple[bool, bool]]], verdict: EventVerdict) -> None:
    assert judge([Look(at_s, *said) for at_s, said in looks], 0.0, PATIENCE) is verdict


@pytest.mark.parametrize("verdict", EventVerdict)
def test_only_a_device_that_would_send_wrong_or_no_kv_is_a_problem(verdict: EventVerdict) -> None:
    problem = events_problem(verdict, "npu:3", PATIENCE)
    assert bool(problem) is (verdict in (EventVerdict.EARLY, EventVerdict.NEVER, EventVerdict.STUCK))
    assert not problem or (problem.startswith("device npu:3: ") and problem.count(": ") == 2)


@pytest.mark.parametrize(
    ("length_s", "count", "took_s", "needed"),
    [(0.1, 64, 0.008, 800), (0.1, 1, 0.5, 1), (0.03, 4096, 0.0, 122_880_000), (0.3, 1, 0.3, 1)],
)
def test_work_is_as_long_as_what_was_measured_says(length_s: float, count: int, took_s: float, needed: int) -> None:
    assert count_for(length_s, count, took_s) == needed
