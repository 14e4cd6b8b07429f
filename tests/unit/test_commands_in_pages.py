"""Every command that the pages tell a reader to type is one that exists, with flags that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import urlsplit

import pytest

from chart_cases.pages import OPERATIONS, QUICK_START
from pdcluster_cli import doctor
from pdcluster_cli.cluster import explain, plan, top, why
from pdcluster_cli.commands import SUBCOMMANDS
from pdcluster_cli.local.options import parse_options
from pdcluster_cli.pod import drain, ready
from pdcluster_router.__main__ import parse_settings
from pdcluster_router.core.apis.client_apis import REQUEST_PATHS
from pdcluster_router.core.clients.api_keys import parse_keys

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
ELSEWHERE: Final = (QUICK_START, OPERATIONS)
"""``test_kubernetes_page.py`` holds their commands for helm, kubectl and docker against what there is."""
IN_README: Final = ("local", "router", "doctor")
"""What a person types first."""
PARSERS: Final = {
    "doctor": doctor.make_parser,
    "drain": drain.make_parser,
    "ready": ready.make_parser,
    "explain": explain.make_parser,
    "plan": plan.make_parser,
    "top": top.make_parser,
    "why": why.make_parser,
}


def commands_in(page: str) -> list[str]:
    """Lines to type: those after a ``$`` in a console block, every line of an sh block."""
    found: list[str] = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        lines = block.replace("\\\n", "").splitlines()
        if language == "console":
            found += [line[2:] for line in lines if line.startswith("$ ")]
        elif language == "sh":
            found += [line for line in lines if line and not line.startswith("#")]
    return found


COMMANDS: Final = sorted(
    {command for page in PAGES if page not in ELSEWHERE for command in commands_in(page.read_text())}
)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def check_make(words: list[str]) -> None:
    """The targets exist, and ``make run`` gives ``pdcluster local`` flags that it takes."""
    targets = {word for word in words if "=" not in word}
    assert targets <= make_targets()
    for word in words:
        name, _, flags = word.partition("=")
        if name == "ARGS" and "run" in targets:
            assert parse_options(shlex.split(flags))


def check_pdcluster(words: list[str]) -> None:
    """The subcommand takes these flags. Only parses: nothing starts."""
    subcommand, flags = words[0], words[1:]
    assert subcommand in SUBCOMMANDS
    if "--help" in flags:
        return  # carried out below
    if subcommand == "router":
        assert parse_settings(flags).prefill_urls
        return
    if subcommand == "local":
        assert parse_options(flags)
        return
    assert PARSERS[subcommand]().parse_args(flags)


def check_module(words: list[str]) -> None:
    """The module exists; it is not imported, vLLM's costs seconds."""
    package, *rest = words[0].split(".")
    spec = find_spec(package)
    assert spec is not None
    folders = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    assert any(folder.with_suffix(".py").exists() or folder.is_dir() for folder in folders), words[0]


def check_key(command: str) -> None:
    """It makes a key and a line of its own that the router takes."""
    with TemporaryDirectory() as folder:
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, check=True, capture_output=True)
        key = Path(folder, "team-a.key").read_bytes()
        assert len(key) == 64
        assert parse_keys(Path(folder, "api-keys").read_text()).name_of(key) == "team-a"


def check(command: str) -> None:
    words = shlex.split(command)
    match [words[0].removeprefix(".venv/bin/"), *words[1:]]:
        case ["make", *arguments]:
            check_make(arguments)
        case ["pdcluster", *arguments]:
            check_pdcluster(arguments)
        case ["python", "-m", *arguments]:
            check_module(arguments)
        case ["curl", url, *_]:
            assert urlsplit(url).path.encode() in REQUEST_PATHS
        case ["export", *settings]:
            assert all("=" in setting for setting in settings)
        case ["openssl", "rand", *_]:
            check_key(command)
        case [".", ".venv/bin/activate"]:
            assert "VENV=.venv" in (ROOT / "tools" / "bootstrap.sh").read_text()
        case _:
            pytest.fail(f"no rule says whether this works: {command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_a_page_exists(command: str) -> None:
    check(command)


def test_the_pages_show_the_commands_that_matter() -> None:
    readme = commands_in((ROOT / "README.md").read_text())
    assert {"make run", "make test"} <= set(readme)
    assert {shlex.split(line)[1] for line in readme if "pdcluster " in line.partition("'")[0]} == set(IN_README)


@pytest.mark.parametrize(
    "wrong",
    [
        *("make coffee", 'make run ARGS="--no-such-flag"', "python -m no_such_module", "wget x"),
        *("pdcluster dance", "pdcluster local --no-such-flag"),
    ],
)
def test_the_check_is_not_blind(wrong: str) -> None:
    with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
        check(wrong)


def test_a_block_is_read_as_a_reader_does() -> None:
    page = "```console\n$ make \\\nrun\noutput\n```\n```\n$ not this\n```\n```sh\n# comment\nmake test\n```\n"
    assert commands_in(page) == ["make run", "make test"]


@pytest.mark.long
@pytest.mark.parametrize("words", [[], *([subcommand] for subcommand in SUBCOMMANDS)])
def test_help_works_everywhere(words: list[str]) -> None:
    command = [sys.executable, "-m", "pdcluster_cli", *words, "--help"]
    help_text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert help_text.startswith(" ".join(["usage: pdcluster", *words]))


def test_make_help_names_the_targets() -> None:
    listed = subprocess.run(["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, check=True).stdout
    assert {line.partition("\t")[0] for line in listed.decode().splitlines()} == make_targets()
