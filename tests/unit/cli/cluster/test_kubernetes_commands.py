"""``pdcluster explain`` and ``pdcluster plan``: what they print for files and for what an API server says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import pytest
import yaml
from anyio.from_thread import start_blocking_portal

from fakes.api_server import ApiServer, Fault, is_list
from integration.ports import fresh_port
from pdcluster_cli.__main__ import main
from pdcluster_operator.core.status.conditions import EventReason
from pdcluster_operator.core.status.explain import NOT_LOOKED_AT
from pdcluster_operator.kinds import PDCLUSTER, SCALER

ROOT: Final = Path(__file__).resolve().parents[4]
EXAMPLE: Final = ROOT / "examples" / "cpu.yaml"


@pytest.fixture
def example() -> dict[str, Any]:
    return dict(yaml.safe_load(EXAMPLE.read_text()))


def condition(name: str, status: str, reason: str, message: str) -> dict[str, object]:
    time = "2026-11-21T10:00:00Z"
    return {"type": name, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}


def put(folder: Path, document: object) -> str:
    path = folder / "object.json"
    path.write_text(json.dumps(document))
    return str(path)


def write_kubeconfig(home: Path, server: str) -> None:
    """Where kubectl looks."""
    document = {
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "contexts": [
            {"name": "c", "context": {"cluster": "k"}},
            {"name": "of-b", "context": {"cluster": "k", "namespace": "team-b"}},
        ],
        "users": [],
        "current-context": "c",
    }
    (home / ".kube").mkdir()
    (home / ".kube" / "config").write_text(json.dumps(document))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    return tmp_path


@pytest.fixture
def api(home: Path) -> Iterator[ApiServer]:
    """The kubeconfig names it."""
    server = ApiServer()
    with start_blocking_portal() as portal:
        portal.call(server.start)
        write_kubeconfig(home, server.url)
        yield server
        portal.call(server.stop)


class Printed(NamedTuple):
    out: str
    err: str


class Typed(Protocol):
    def __call__(self, *words: str, status: int = 0) -> Printed: ...


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    """What the command prints that these words make, and that ends with this status."""

    def run(*words: str, status: int = 0) -> Printed:
        assert main(words) == status
        return Printed(*capsys.readouterr())

    return run


def store(api: ApiServer, document: dict[str, Any], namespace: str = "default") -> None:
    api.store.create(("pdclusters", namespace, "tiny"), document)


def asked(api: ApiServer) -> list[str]:
    return [one.path for one in api.asked]


PATH: Final = "/apis/pdcluster.dev/v1alpha1/namespaces/{}/pdclusters/tiny"


def test_what_is_ready_is_status_0(tmp_path: Path, example: dict[str, Any], typed: Typed) -> None:
    status = {"conditions": [condition("Ready", "True", "Serving", "")], "target": "a-b-c"}
    told = typed("explain", "-f", put(tmp_path, {**example, "status": status})).out
    assert told == "Ready: 0 prefill and 0 decode instances serve a-b-c.\n"


def test_what_is_not_ready_is_told_with_its_cure(tmp_path: Path, example: dict[str, Any], typed: Typed) -> None:
    waiting = condition("PrefillReady", "False", "InstancesNotReady", "0 of 1 instances are ready")
    status = {"conditions": [waiting, condition("Ready", "False", "InstancesNotReady", "PrefillReady")]}
    told = typed("explain", "-f", put(tmp_path, {**example, "status": status}), status=1).out
    assert told.startswith("PrefillReady is False (0 of 1 instances are ready). Engines take minutes")
    assert "kubectl describe pod" in told


def test_what_a_condition_says_steers_no_terminal(tmp_path: Path, example: dict[str, Any], typed: Typed) -> None:
    quoting = condition("Accepted", "False", "Refused", "spec.model is \x1b[2J\x9b1Aa\nReady: all is well")
    status = {"conditions": [quoting, condition("Ready", "False", "Refused", "")], "target": "a\x1b[1mb"}
    told = typed("explain", "-f", put(tmp_path, {**example, "status": status}), status=1).out
    assert told[:-1].isprintable(), "one line"
    assert "Ready: all is well" in told


def test_an_object_without_status_was_not_looked_at(tmp_path: Path, example: dict[str, Any], typed: Typed) -> None:
    assert typed("explain", "-f", put(tmp_path, example), status=1).out == f"{NOT_LOOKED_AT}\n"


def test_a_status_of_the_spec_before_says_nothing_of_this_one(
    tmp_path: Path, example: dict[str, Any], typed: Typed
) -> None:
    status = {"conditions": [condition("Ready", "True", "Serving", "")], "target": "a-b-c", "observedGeneration": 1}
    changed = {**example, "metadata": {**example["metadata"], "generation": 2}, "status": status}
    assert typed("explain", "-f", put(tmp_path, changed), status=1).out == f"{NOT_LOOKED_AT}\n"


@pytest.mark.parametrize(
    ("words", "namespace"), [([], "default"), (["--context", "of-b"], "team-b"), (["-n", "team-a"], "team-a")]
)
def test_the_api_server_is_asked_for_a_name_in_its_namespace(
    words: list[str], namespace: str, example: dict[str, Any], api: ApiServer, typed: Typed
) -> None:
    store(api, example, namespace)
    assert typed("explain", "tiny", *words, status=1).out == f"{NOT_LOOKED_AT}\n"
    assert asked(api) == [PATH.format(namespace), f"/api/v1/namespaces/{namespace}/events"]


def test_events_of_the_pdcluster_are_told_with_their_cure_the_oldest_first(
    example: dict[str, Any], api: ApiServer, typed: Typed
) -> None:
    store(api, example)
    [pool] = api.store.all_of("pdclusters")
    for name, uid, time in [
        ("b", pool["metadata"]["uid"], "10"),
        ("c", pool["metadata"]["uid"], "09"),
        ("d", "x", "08"),
    ]:
        event = {
            "metadata": {"name": name},
            "involvedObject": {"uid": uid},
            "reason": "TakenBack",
            "message": f"{name} was\x1b\nset",  # One line, which steers no terminal, is told.
            "lastTimestamp": f"2026-11-27T{time}:00:00Z",
        }
        api.store.create(("events", "default", name), event)
    cure = EventReason.TAKEN_BACK.cure
    told = typed("explain", "tiny", status=1).out.splitlines()
    assert told == [NOT_LOOKED_AT, f"TakenBack (c was set). {cure}", f"TakenBack (b was set). {cure}"]


def test_a_user_who_may_not_read_events_is_told_the_status(
    example: dict[str, Any], api: ApiServer, typed: Typed
) -> None:
    store(api, example)
    api.faults = [Fault(lambda one: one.path.endswith("/events"), 403)]
    told = typed("explain", "tiny", status=1)
    assert told.out == f"{NOT_LOOKED_AT}\n"
    [line] = told.err.splitlines()
    assert line.startswith("pdcluster explain: Events of the PDCluster cannot be read: the API server answered 403")


@pytest.mark.parametrize("namespace", [None, "team-a"])
def test_a_plan_from_the_cluster_asks_where_kubectl_apply_would_put_it(
    namespace: str | None, tmp_path: Path, example: dict[str, Any], api: ApiServer, typed: Typed
) -> None:
    if namespace:
        example["metadata"]["namespace"] = namespace
    store(api, example, namespace or "default")
    assert "no engine is replaced" in typed("plan", "-f", put(tmp_path, example), "--from-cluster").out
    assert asked(api) == [PATH.format(namespace or "default")]


def test_what_runs_may_have_fields_of_a_newer_crd_and_a_file_may_not(
    tmp_path: Path, example: dict[str, Any], api: ApiServer, typed: Typed
) -> None:
    newer = {**example, "spec": {**example["spec"], "rails": 4}}
    store(api, newer)
    assert "no engine is replaced" in typed("plan", "-f", str(EXAMPLE), "--from-cluster").out
    assert "spec.rails: there is no such field" in typed("plan", "-f", put(tmp_path, newer), status=2).err


def test_before_the_first_apply_nothing_runs_yet_in_the_cluster_either(api: ApiServer, typed: Typed) -> None:
    assert "nothing runs yet" in typed("plan", "-f", str(EXAMPLE), "--from-cluster").out


def test_a_cluster_without_our_kinds_is_not_one_in_which_nothing_runs(api: ApiServer, typed: Typed) -> None:
    api.served -= {PDCLUSTER, SCALER}
    said = "the API server answered 404: 404 page not found: are pdcluster's CRDs installed?"
    assert typed("plan", "-f", str(EXAMPLE), "--from-cluster", status=2).err == f"pdcluster plan: {said}\n"


def test_what_the_api_server_refuses_is_said_in_its_own_words(api: ApiServer, typed: Typed) -> None:
    said = 'the API server answered 404: pdclusters "tiny" not found'
    assert typed("explain", "tiny", status=2).err == f"pdcluster explain: {said}\n"


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{"])
def test_an_answer_that_is_no_object_is_refused_in_one_line(answer: bytes, api: ApiServer, typed: Typed) -> None:
    api.faults.append(Fault(is_list, answer))
    assert typed("explain", "tiny", status=2).err == "pdcluster explain: the API server's answer is no object\n"


def test_an_object_that_is_nested_too_deep_for_python_is_explained(api: ApiServer, typed: Typed) -> None:
    """The operator survives it, and says in its status what is wrong."""
    deep = b'{"metadata": {"name": "tiny", "generation": 1}, "spec": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001
    api.faults.append(Fault(is_list, deep))
    assert "The operator has not looked at it" in typed("explain", "tiny", status=1).out


def test_a_cluster_that_is_not_there_is_told(home: Path, typed: Typed) -> None:
    port = fresh_port()
    write_kubeconfig(home, f"http://127.0.0.1:{port}")
    plan, why = ["plan", "-f", str(EXAMPLE), "--from-cluster"], ["why", "an-id", "--cluster", "tiny"]
    for words in (["explain", "tiny"], plan, why):
        told = typed(*words, status=2).err
        assert f"127.0.0.1:{port}" in told
        assert told.endswith(
            ": is this the API server you mean, and is it up? --context and --kubeconfig name another one\n"
        )


@pytest.mark.usefixtures("home")
def test_without_a_kubeconfig_the_cure_is_named(typed: Typed) -> None:
    said = "there is no kubeconfig ~/.kube/config: name one with --kubeconfig or KUBECONFIG"
    assert typed("explain", "tiny", status=2).err == f"pdcluster explain: {said}\n"


def test_a_plan_lists_children_and_steps(typed: Typed) -> None:
    told = typed("plan", "-f", str(EXAMPLE)).out
    assert "nothing runs yet" in told
    assert "  Deployment " in told
    assert "steps:\n  1. " in told


def test_a_plan_says_which_rules_nobody_has_checked_and_who_does(
    tmp_path: Path, example: dict[str, Any], typed: Typed
) -> None:
    example["spec"]["roles"]["decode"].setdefault("engineArgs", {})["dtype"] = "float16"
    file = put(tmp_path, example)
    last = typed("plan", "-f", file).out.splitlines()[-1]
    assert last == f"rules between fields are checked by the API server only: kubectl apply --dry-run=server -f {file}"


def test_the_help_of_plan_says_what_it_does_not_check_and_whose_replicas_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "checked by the API server only: kubectl apply --dry-run=server -f FILE" in told
    assert "its replicas are those of the spec, also where scalers say others" in told


def test_a_plan_from_what_runs_says_what_is_replaced(tmp_path: Path, example: dict[str, Any], typed: Typed) -> None:
    example["spec"]["roles"]["decode"].setdefault("engineArgs", {})["max-num-seqs"] = "7"
    told = typed("plan", "-f", put(tmp_path, example), "--before", str(EXAMPLE)).out
    assert "the same revision, and only decode is replaced" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Pod", "has no object of kind PDCluster"),
        ("{", "is neither YAML nor JSON"),
        (
            "kind: PDCluster\n---\nkind: Pod\n---\nkind: PDCluster",
            "has 2 objects of kind PDCluster: give them one at a time",
        ),
        ("kind: PDCluster\napiVersion: pdcluster.dev/v1alpha1\nmetadata: {name: a}\nspec: {}", "spec.image: Field req"),
    ],
)
def test_a_file_that_says_no_pdcluster_is_refused(tmp_path: Path, text: str, words: str, typed: Typed) -> None:
    (tmp_path / "file.yaml").write_text(text)
    assert words in typed("plan", "-f", str(tmp_path / "file.yaml"), status=2).err


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize(
    "metadata",
    ["", "metadata:", "metadata: tiny", "metadata: [tiny]", "metadata: {namespace: a}", "metadata: {name: ''}"],
)
def test_an_object_without_a_name_is_refused_in_one_line(
    tmp_path: Path, command: str, metadata: str, typed: Typed
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(f"kind: PDCluster\napiVersion: pdcluster.dev/v1alpha1\n{metadata}\nspec: {{}}\n")
    said = f"pdcluster {command}: {file} has a PDCluster without a name: give it metadata.name\n"
    assert typed(command, "-f", str(file), status=2).err == said


@pytest.mark.parametrize(
    "text", [b"\xff\xfe\x00", b"a: !!int x", b"a: !!bool maybe", b"a: !!timestamp x", b"a: !!int ''", b"[" * 9000]
)
def test_what_is_no_yaml_is_refused_in_one_line(tmp_path: Path, text: bytes, typed: Typed) -> None:
    path = tmp_path / "pool.yaml"
    path.write_bytes(text)
    [told] = typed("plan", "-f", str(path), status=2).err.splitlines()
    assert f"{path} is neither YAML nor JSON: " in told


def test_aliases_without_end_are_refused_in_one_line(tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / "pool.yaml"
    nested = "\n".join(f"a{n}: &a{n} {'[' * 40}*a{n - 1}{']' * 40}" for n in range(1, 60))
    path.write_text(f"{EXAMPLE.read_text()}\na0: &a0 x\n{nested}\n")
    [told] = typed("plan", "-f", str(path), status=2).err.splitlines()
    assert "has what JSON cannot say" in told


def test_what_json_cannot_say_is_refused_in_one_line_but_in_other_objects(tmp_path: Path, typed: Typed) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"{EXAMPLE.read_text()}\n---\nkind: ConfigMap\nmore: !!binary aGk=\n")
    assert main(["plan", "-f", str(path)]) == 0
    path.write_text(f"{EXAMPLE.read_text()}\nmore: !!binary aGk=\n")
    assert "pool.yaml has what JSON cannot say" in typed("plan", "-f", str(path), status=2).err


def test_a_file_that_is_not_there_is_named(typed: Typed) -> None:
    told = typed("plan", "-f", "/no/such/file", status=2).err
    assert told == "pdcluster plan: /no/such/file cannot be read: No such file or directory\n"


# ``pdcluster why``.


def router_pod(
    api: ApiServer, name: str, cluster: str = "tiny", component: str = "router", args: Sequence[str] = ()
) -> None:
    labels = {"pdcluster.dev/cluster": cluster, "app.kubernetes.io/component": component}
    spec = {"containers": [{"name": component, "args": list(args)}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    api.store.create(("pods", "default", name), pod)


def proxied(pod: str, how: int | bytes) -> Fault:
    """The API server's proxy to this pod answers so."""
    path = f"/api/v1/namespaces/default/pods/{pod}:8001/proxy/pdcluster/requests"
    return Fault(lambda one: one.path == path and one.query == {"id": "R/7"}, how, 99)


def test_each_router_pod_of_a_pool_is_asked_through_the_api_server(api: ApiServer, typed: Typed) -> None:
    for name, cluster, component in [("a", "tiny", "router"), ("b", "tiny", "router"), ("c", "other", "router")]:
        router_pod(api, name, cluster, component)
    router_pod(api, "d", component="decode")
    had = {"requests": [{"request_id": "R/7", "ended_at_unix_s": 1, "outcome": "ok", "status": 200}]}
    api.faults = [proxied("a", b"{}"), proxied("b", json.dumps(had).encode())]
    told = typed("why", "R/7", "--cluster", "tiny")
    assert told.out.startswith("R/7 went well, 1970-01-01 00:00:01 UTC (told by b)")
    assert sorted(path for path in asked(api) if "/proxy/" in path) == [
        f"/api/v1/namespaces/default/pods/{name}:8001/proxy/pdcluster/requests" for name in "ab"
    ]


def test_the_api_server_asks_routers_with_tls_by_https(api: ApiServer, typed: Typed) -> None:
    router_pod(api, "a", args=["--port=8000", "--internal-tls-cert=/etc/pdcluster/pool-tls/tls.crt"])
    typed("why", "R/7", "--cluster", "tiny", status=2)
    assert [path for path in asked(api) if "/proxy/" in path] == [
        "/api/v1/namespaces/default/pods/https:a:8001/proxy/pdcluster/requests"
    ]


def test_a_router_pod_that_cannot_be_asked_is_named_with_a_cure(api: ApiServer, typed: Typed) -> None:
    router_pod(api, "a")
    api.faults = [proxied("a", 403)]
    told = typed("why", "R/7", "--cluster", "tiny", status=2)
    assert told.out == ""
    assert told.err.startswith("pdcluster why: a: the API server answered 403: a fault of the test (your account needs")
    assert "port-forward" in told.err


def test_a_pool_without_router_pods_is_told_in_one_line(api: ApiServer, typed: Typed) -> None:
    told = typed("why", "R/7", "--cluster", "tiny", "-n", "team-b", status=2)
    assert told.err == "pdcluster why: no router pods of PDCluster team-b/tiny: are its name and -n right?\n"


def test_without_a_way_to_an_api_server_no_router_can_be_asked(home: Path, typed: Typed) -> None:
    assert not (home / ".kube").exists()
    assert typed("why", "R", "--cluster", "tiny", status=2).err.startswith("pdcluster why: ")
