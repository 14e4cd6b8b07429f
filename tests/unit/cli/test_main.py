"""``pdcluster`` finds its subcommand, and ends with the status that scripts expect."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from integration.ports import fresh_port
from patience import PATIENCE_S
from pdcluster_cli.__main__ import main

ROOT: Final = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("words", [[], ["dance"], ["local", "--no-such-flag"], ["doctor", "--port", "x"]])
def test_words_that_mean_nothing_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: pdcluster" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert {"local", "router", "doctor", "drain", "ready"} <= set(capsys.readouterr().out.split())


def test_the_routers_words_are_the_routers_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--prefill", "nonsense", "--decode", "http://d:1"]) == 2
    assert capsys.readouterr().err.startswith("pdcluster router: ")


@pytest.mark.parametrize("name", ["drain", "ready"])
def test_what_a_pod_runs_every_few_seconds_imports_next_to_nothing(name: str) -> None:
    code = f"import sys; from pdcluster_cli.__main__ import main; main(['{name}', '--help'])"
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); " + code
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=False)
    ours = {module for module in done.stderr.split() if module.startswith("pdcluster_")}
    assert done.returncode == 0
    assert ours <= {
        "pdcluster_cli",
        "pdcluster_cli.__main__",
        "pdcluster_cli.commands",
        "pdcluster_cli.pod",
        f"pdcluster_cli.pod.{name}",
        "pdcluster_cli.pod.engine_http",
        "pdcluster_cli.pod.idleness",
        "pdcluster_cli.pod.sockets",
        "pdcluster_cli.numbers",
        "pdcluster_cli.pod.zmtp",
        "pdcluster_cli.tls_flags",
        "pdcluster_protocol",
        "pdcluster_protocol.labels",
        "pdcluster_protocol.launch",
        "pdcluster_protocol.pem_files",
    }
    assert not {"numpy", "zmq", "msgspec", "pydantic", "asyncio"} & set(done.stderr.split())


def test_the_doctor_finds_nothing_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", str(fresh_port())]) == 0
    assert all(line.startswith("ok ") for line in capsys.readouterr().out.splitlines())


def test_the_doctor_names_what_needs_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--port", str(port)]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem ")]
    assert len(problems) == 1
    assert f"port {port}" in problems[0]


@pytest.mark.long
def test_routers_and_operators_start_without_what_only_engines_have() -> None:
    """Their image has neither numpy nor torch."""
    program = """
import contextlib, sys
from pdcluster_cli.__main__ import main
for words in (["--help"], ["router", "--help"], ["operator", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
print("loaded:", *sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    help_pages, _, names = done.stdout.partition("loaded: ")
    loaded = set(names.split())
    assert help_pages.count("usage: pdcluster") == 3
    assert {"pdcluster_router.__main__", "pdcluster_operator.__main__"} <= loaded
    assert loaded.isdisjoint({"numpy", "torch", "vllm", "zmq", "safetensors"})


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that has pdcluster without any extra: msgspec, and our own packages."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    parts = ("protocol", "router", "connector", "operator", "kube", "cli")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *(str(ROOT / part) for part in parts)])}


def typed(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """``-S``: nothing else is installed."""
    command = [sys.executable, "-S", "-m", "pdcluster_cli", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["router", "--prefill", "http://p:1", "--decode", "http://d:1"], "router"),
        (["operator"], "operator"),
        (["explain", "tiny"], "operator"),
        (["why", "req-1", "--cluster", "tiny"], "operator"),
        (["top", "--cluster", "tiny"], "operator"),
        (["plan", "-f", "examples/cpu.yaml"], "operator"),
        (["local"], "router,connector"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_without_its_extra_names_it_in_one_line(words: list[str], extra: str, bare: dict[str, str]) -> None:
    done = typed(words, bare)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"pdcluster {words[0]}: Python has no module ")
    assert line.endswith(f": pip install 'pdcluster[{extra}]'")


@pytest.mark.parametrize(
    "words", [["--help"], ["drain", "--help"], ["ready", "--help"], ["doctor", "--help"], ["local", "--help"]]
)
def test_help_and_what_pods_run_need_no_extra(words: list[str], bare: dict[str, str]) -> None:
    done = typed(words, bare)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_of_ours_that_is_missing_is_no_missing_extra(bare: dict[str, str]) -> None:
    done = typed(["operator"], {**bare, "PYTHONPATH": bare["PYTHONPATH"].replace(str(ROOT / "operator"), "")})
    assert "Traceback" in done.stderr
    assert "No module named 'pdcluster_operator'" in done.stderr


def test_ctrl_c_while_the_command_is_still_loading_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise KeyboardInterrupt")  # As when it comes during this import.
    done = subprocess.run(
        [sys.executable, "-m", "pdcluster_cli", "router", "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pdcluster: stopped\n")


SERVES: Final = """
import sys
from pdcluster_cli.__main__ import main
from pdcluster_cli.local import command
def serve(_):
    for _ in range(50): print("answer " * 9000, flush=True)
command._check_and_serve = serve
sys.exit(main(["local", "--once"]))
"""


@pytest.mark.parametrize(
    ("words", "is_buffered"),
    [
        (["-c", SERVES], True),
        (["-c", SERVES], False),
        (["-m", "pdcluster_cli", "doctor"], True),
        (["-m", "pdcluster_cli", "doctor"], False),
        (["-m", "pdcluster_cli", "--help"], True),  # Without a buffer argparse keeps the error to itself.
        (["-m", "pdcluster_cli", "drain", "--help"], True),
    ],
    ids=["local", "local-unbuffered", "doctor", "doctor-unbuffered", "help", "drain"],
)
def test_a_reader_that_has_enough_ends_the_command_with_status_141(words: list[str], is_buffered: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env |= {} if is_buffered else {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=env, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_stdout_that_was_never_open_is_no_fault() -> None:
    command = [sys.executable, "-m", "pdcluster_cli", "drain", "--help"]
    script = 'exec "$@" >&-'
    done = subprocess.run(["sh", "-c", script, "sh", *command], stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


def test_what_the_terminal_cannot_show_is_no_error() -> None:
    program = "from pdcluster_cli.__main__ import main; import pdcluster_cli.doctor as it\n"
    program += "it.main = lambda _: print('Grüße') or 0\nimport sys; sys.exit(main(['doctor']))"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Gr??e\n", b"")
