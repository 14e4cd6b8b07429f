"""What ``--model`` may be, and the one line where engines could not get it."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.ports import fresh_port
from pdcluster_cli.models.model_source import Hub, HubAnswer, ModelSource, ask_hub, find_model, has_copy

WANTED = "--model wants a folder with config.json, weights and a tokenizer, or a model's name on a hub"


def never() -> Hub:
    raise AssertionError("a hub was asked for")


def hub_at(
    cache: Path, *, refusal: str | None = None, unreachable: str | None = None, is_offline: bool = False
) -> Callable[[], Hub]:
    """A hub that answers so, and never anything when it must not be asked."""

    def ask(name: str) -> HubAnswer:
        assert not is_offline, f"asked for {name}"
        return HubAnswer(refusal, unreachable)

    return lambda: Hub("hub", cache, is_offline, ask)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A cache that holds org/name."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("file", ["config.json", "params.json", "weights.gguf"])
def test_a_folder_that_vllm_can_load_is_named_by_its_whole_path(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    found = find_model(str(tmp_path / ".." / tmp_path.name), {}, never)
    assert (found.argument, found.problem) == (str(tmp_path), None)


def test_a_file_of_weights_that_hold_their_configuration_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "w.gguf").write_text("")
    assert find_model(str(tmp_path / "w.gguf"), {}, never).problem is None


@pytest.mark.parametrize(
    ("name", "found"), [("empty", "has no config.json"), ("nowhere", "does not exist"), ("file", "is no folder")]
)
def test_what_is_no_model_is_named_with_what_is_wanted(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("weights")
    model = tmp_path / name
    assert find_model(str(model), {}, never).problem == f"model {model} {found}: {WANTED}"


def test_an_object_store_is_vllms_business() -> None:
    assert find_model("s3://bucket/model", {}, never) == ModelSource("s3://bucket/model")


def test_modelscope_needs_its_library() -> None:
    problem = "VLLM_USE_MODELSCOPE is set and modelscope is not installed: pip install modelscope, or unset it"
    assert find_model("org/name", {"VLLM_USE_MODELSCOPE": "True"}, never).problem == problem


def test_a_name_that_the_hub_knows_goes_to_vllm_as_it_is(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(name: str) -> HubAnswer:
        asked.append(name)
        return HubAnswer()

    hub = Hub("hub", tmp_path, False, ask)
    assert find_model("org/name:Q4_K_M", {}, lambda: hub) == ModelSource("org/name:Q4_K_M")
    assert asked == ["org/name"]


def test_a_name_that_the_hub_does_not_know_is_one_line(copied: Path) -> None:
    found = find_model("org/name", {}, hub_at(copied, refusal="no such model"))
    assert found.problem == "model org/name is no folder here, and hub says: no such model"


def test_without_a_way_to_the_hub_one_line_says_so(tmp_path: Path) -> None:
    assert find_model("org/name", {}, hub_at(tmp_path, unreachable="no route")).problem == (
        f"model org/name is no folder here and not in {tmp_path}, and there is no way to hub (no route): "
        "give a folder, or set HF_ENDPOINT or HTTPS_PROXY"
    )


def test_a_copy_is_served_where_there_is_no_way_to_the_hub(copied: Path) -> None:
    found = find_model("org/name", {}, hub_at(copied, unreachable="no route"))
    assert (found.problem, found.env) == (None, {"HF_HUB_OFFLINE": "1"})
    assert found.remark == f"no way to hub (no route): the copy in {copied} is served"


def test_offline_no_hub_is_asked(copied: Path) -> None:
    hub = hub_at(copied, is_offline=True)
    assert find_model("org/name", {}, hub) == ModelSource("org/name")
    problem = find_model("org/other", {}, hub).problem
    assert problem is not None
    assert problem.startswith(f"model org/other is no folder here and not in {copied}, and HF_HUB_OFFLINE is set: ")


@pytest.mark.parametrize(
    ("written", "read"), [('{"num_attention_heads": 8}', {"num_attention_heads": 8}), ("[]", {}), ("{", {}), (None, {})]
)
def test_the_configuration_of_a_folder_is_read_where_it_can_be(
    tmp_path: Path, written: str | None, read: dict[str, int]
) -> None:
    (tmp_path / "params.json").write_text("{}")
    if written is not None:
        (tmp_path / "config.json").write_text(written)
    assert find_model(str(tmp_path), {}, never).read_config() == read


@pytest.mark.parametrize("answer", [{}, {"unreachable": "no route"}, {"is_offline": True}])
def test_the_configuration_of_a_copy_is_that_of_the_newest_revision(copied: Path, answer: dict[str, Any]) -> None:
    folder = copied / "models--org--name"
    (folder / "snapshots" / "abc" / "config.json").write_text('{"num_attention_heads": 8}')
    hub = hub_at(copied, **answer)
    assert find_model("org/name", {}, hub).read_config() == {}, "no revision is the newest"
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    assert find_model("org/name", {}, hub).read_config() == {"num_attention_heads": 8}


def test_the_hub_is_the_one_of_its_librarys_own_variables(tmp_path: Path) -> None:
    program = (
        "from pdcluster_cli.models.model_source import hub_of_environment; "
        "hub = hub_of_environment(); print(hub.endpoint, hub.cache, hub.is_offline)"
    )
    env = {**os.environ, "HF_ENDPOINT": "http://mirror", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["http://mirror", f"{tmp_path}/hub", "True"]


def test_only_a_copy_with_a_configuration_is_one(tmp_path: Path) -> None:
    (tmp_path / "models--a--b" / "snapshots" / "1").mkdir(parents=True)
    assert not has_copy(tmp_path, "a/b")


class Pages(http.server.BaseHTTPRequestHandler):
    """Answers with the status that is the end of the model's name."""

    def do_GET(self) -> None:
        body = b'{"id": "org/name"}'
        last = self.path.rpartition("-")[2]
        self.send_response(int(last) if last.isdigit() else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_a_home_of_a_user_who_does_not_exist_is_a_folder_that_does_not() -> None:
    problem = find_model("~no-such-user/x", {}, never).problem
    assert problem == f"model ~no-such-user/x does not exist: {WANTED}"


def test_a_configuration_that_is_nested_too_deep_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    assert find_model(str(tmp_path), {}, never).read_config() == {}


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="hub")
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "refused", "unreachable"),
    [(200, False, False), (404, True, False), (401, True, False), (403, True, False), (500, False, True)],
)
def test_a_real_answer_is_understood(url: str, status: int, refused: bool, unreachable: bool) -> None:
    answer = ask_hub(url, f"org/name-{status}")
    assert (answer.refusal is not None, answer.unreachable is not None) == (refused, unreachable), answer


def test_a_name_that_can_be_none_is_told_without_asking() -> None:
    assert ask_hub("http://nowhere.invalid", "a/b/c").refusal == "its models are called ORG/MODEL"


def test_a_closed_door_is_noticed_long_before_an_engine_would() -> None:
    began = time.monotonic()
    assert ask_hub(f"http://127.0.0.1:{fresh_port()}", "org/name").unreachable
    assert time.monotonic() - began < 60  # vLLM asks again and again, in each engine.
