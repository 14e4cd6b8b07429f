"""Decides whether a machine can serve, from facts about the installed Mooncake, Ascend's needs and the device's events.

Reads no file or clock, starts no thread. A problem is one line with both values and the cure; no problem is empty text.

Source of truth: the wheels (``readelf -d``) mooncake-transfer-engine 0.3.13.post1 (needs ``libcudart.so.12``), -cuda13
0.3.14 (``libcudart.so.13``), -npu 0.3.13.post1 (``ascend_transport.so``) and torch_npu 2.10.0.post4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

WHEEL: Final = "mooncake-transfer-engine"
OLDEST_MOONCAKE: Final = "0.3.12.post1"
"""Older versions report over TCP that bytes have arrived when they were only sent."""

_DEVICE_OF: Final = {
    WHEEL: ("cuda", "12"),
    f"{WHEEL}-cuda13": ("cuda", "13"),
    f"{WHEEL}-npu": ("npu", ""),
    f"{WHEEL}-non-cuda": ("cpu", ""),
}
"""Mooncake's builds: the device whose memory each can read, and the major version of its CUDA; empty: it needs none."""
BUILDS: Final = tuple(_DEVICE_OF)
_CHOSEN_BY_DEVICE: Final = ("cuda", "npu")
"""Devices that need their own build. On a CPU every build that can be loaded works."""

CANN_LIBRARIES: Final = (
    "libascendcl.so", "libllm_datadist.so", "libmetadef.so",
    "libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so",
)  # fmt: skip
"""The libraries that Mooncake's build for NPUs needs, then those that only torch_npu needs."""


@dataclass(frozen=True, slots=True)
class MooncakeFacts:
    """The installed builds of Mooncake, the engine's device, and PyTorch's CUDA."""

    builds: tuple[tuple[str, str], ...]
    """Distributions of Mooncake with their versions."""
    device_type: str
    """vLLM's name for the device."""
    torch_cuda: str = ""
    """The CUDA that PyTorch was built for, such as ``13.0``; empty: none."""
    is_own_build: bool = False
    """Whether the one build was installed from a file or URL. Its name then does not say its device."""


def mooncake_problem(facts: MooncakeFacts) -> str:
    """Why this Mooncake cannot serve this device; empty: it can."""
    fitting = _build_for(facts)
    if not facts.builds:
        return (
            f"no build of Mooncake is installed by pip, one of {OLDEST_MOONCAKE} or later is needed: {_cure(fitting)}"
        )
    if len(facts.builds) > 1:
        names = " and ".join(f"{name} {version}" for name, version in facts.builds)
        remove = " ".join(name for name, _ in facts.builds)
        return (
            f"{names} are both installed and overwrite each other's folder mooncake: pip uninstall -y {remove}, then "
            f"{_cure(fitting)}"
        )
    ((name, version),) = facts.builds
    if _numbers(version) < _numbers(OLDEST_MOONCAKE):
        return f"{name} is {version}, {OLDEST_MOONCAKE} or later is needed: pip install -U {name}"
    return _device_problem(name, facts, fitting)


def _device_problem(name: str, facts: MooncakeFacts, fitting: str) -> str:
    device, cuda = _DEVICE_OF.get(name, (facts.device_type, ""))
    if facts.device_type not in _CHOSEN_BY_DEVICE or facts.is_own_build:
        return ""
    replace = f"pip uninstall -y {name}, then {_cure(fitting)}"
    if device != facts.device_type:
        return f"{name} is for device type {device}, this engine's is {facts.device_type}: {replace}"
    if cuda and facts.torch_cuda and cuda != _major(facts.torch_cuda):
        return f"{name} is for CUDA {cuda}, PyTorch here is for CUDA {facts.torch_cuda}: {replace}"
    return ""


def _build_for(facts: MooncakeFacts) -> str:
    wanted = (facts.device_type, _major(facts.torch_cuda))
    return next((name for name, (device, cuda) in _DEVICE_OF.items() if (device, cuda or wanted[1]) == wanted), "")


def _cure(build: str) -> str:
    return f"pip install {build}" if build else f"pip install the one of {', '.join(_DEVICE_OF)} for this device"


def _major(version: str) -> str:
    return version.partition(".")[0]


def _numbers(version: str) -> tuple[int, ...]:
    """``0.3.12.post1+x`` -> (0, 3, 12, 1); a release candidate counts as its release."""
    public = re.split(r"\+|rc|a|b|\.dev", version)[0]
    return tuple(int(number) for number in re.findall(r"\d+", public))


@dataclass(frozen=True, slots=True)
class AscendFacts:
    """Facts about an NPU's machine, apart from its driver."""

    hccn_conf: str
    """Why ``/etc/hccn.conf`` cannot be used; empty: it can."""
    not_loaded: tuple[str, ...]
    """Libraries of CANN that cannot be loaded."""
    uid: int
    user: str
    """The name of ``uid``; empty: it has none."""


def ascend_problems(facts: AscendFacts) -> tuple[str, ...]:
    """Why KV cannot go by Mooncake's ``ascend`` protocol here, or would go wrong without an error."""
    problems = []
    if facts.not_loaded:
        missing = ", ".join(facts.not_loaded)
        problems.append(
            f"CANN's environment is not in effect, {len(facts.not_loaded)} of {len(CANN_LIBRARIES)} libraries cannot "
            f"be loaded ({missing}): start the engine in what CANN's set_env.sh sets, in an image by ENV"
        )
    if facts.hccn_conf:
        problems.append(
            f"/etc/hccn.conf cannot be read ({facts.hccn_conf}), and without the cards' addresses in it answers are "
            "wrong: mount the node's, or write it by hccn_tool"
        )
    if not facts.user:
        problems.append(
            f"user id {facts.uid} has no line in /etc/passwd, and HCCL needs one: add it to the image, or start the "
            "engine as a user that has a name"
        )
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class Look:
    """The answers to two questions: one to an event, then one to memory."""

    at_s: float
    says_done: bool
    """The event's answer."""
    is_written: bool
    """Whether the result of the work before the event was in memory, read after the event's answer."""


class EventVerdict(Enum):
    GO_ON = auto()
    """Ask again."""
    HONEST = auto()
    """The event said "not yet" while the work was under way, and "complete" after it."""
    UNSEEN = auto()
    """The work was over before the first question."""
    EARLY = auto()
    """The event said "complete" while the work was under way."""
    NEVER = auto()
    """The event says "not yet" long after the work."""
    STUCK = auto()
    """The work does not end."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a device may take. Both times are far longer than a working device needs. They end endless waits."""

    late_s: float = 10.0
    """For an event, after the result of its work is in memory."""
    work_s: float = 60.0
    """For work that takes some tenths of a second on an idle device."""


def judge(looks: Sequence[Look], begun_s: float, patience: Patience) -> EventVerdict:
    """The verdict so far. Only the last of ``looks`` may have said "complete".

    EARLY and HONEST do not depend on how fast an answer came: it may be late because the host did not run for a while.
    """
    last = looks[-1]
    if last.says_done and not last.is_written:
        return EventVerdict.EARLY
    if last.says_done:
        return (
            EventVerdict.HONEST
            if any(not look.says_done and not look.is_written for look in looks)
            else EventVerdict.UNSEEN
        )
    written_s = next((look.at_s for look in looks if look.is_written), None)
    if written_s is not None:
        return EventVerdict.NEVER if last.at_s - written_s > patience.late_s else EventVerdict.GO_ON
    return EventVerdict.STUCK if last.at_s - begun_s > patience.work_s else EventVerdict.GO_ON


def events_problem(verdict: EventVerdict, device: str, patience: Patience) -> str:
    """The harm that an engine on such a device would do, and the cure; empty: none."""
    cure = "update the device's driver and PyTorch's build for it, or use another device"
    said = {
        EventVerdict.EARLY: "an event is complete while its work is under way, so KV would leave before it is computed",
        EventVerdict.NEVER: f"an event is not complete {patience.late_s:g} s after its work, so KV would never leave",
        EventVerdict.STUCK: f"work of 0.3 s did not end in {patience.work_s:g} s",
    }
    return f"device {device}: {said[verdict]}: {cure}" if verdict in said else ""


def count_for(length_s: float, measured_count: int, measured_s: float) -> int:
    """How many operations take about ``length_s``, when ``measured_count`` took ``measured_s``: at least 1.

    0.1 s, 64 took 0.008 s: 800.
    """
    return max(1, int(length_s * measured_count / max(measured_s, 1e-6)))
