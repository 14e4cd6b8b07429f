"""``docs/kubernetes-operations.md`` is complete and true: alerts, what a change replaces, what is printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import pytest
import yaml

from chart_cases.pages import OPERATIONS, commands_of
from chart_cases.rendering import CHART
from fakes.operator_cluster import make_cluster
from operator_cases.objects import D, P
from pdcluster_operator.core.manifests.pool import pool_of
from pdcluster_operator.core.manifests.router import router_deployment
from pdcluster_operator.core.plan.preview import preview
from pdcluster_operator.core.plan.target import target_of
from pdcluster_operator.core.seen.observed import Observed
from pdcluster_operator.core.status.conditions import Counts
from pdcluster_operator.core.status.explain import explain
from pdcluster_operator.core.status.pool_status import Facts, Problems, reduce_status

TEXT: Final = OPERATIONS.read_text()
ROWS: Final = [line for line in TEXT.splitlines() if line.startswith("| `")]

REPLACES: Final[dict[str, tuple[Mapping[str, object], str]]] = {
    "model.name": ({"spec.model.name": "other", "spec.model.servedName": "same"}, "both roles"),
    "image": ({"spec.image": "other:2"}, "both roles"),
    "transfer.deadlineSeconds": ({"spec.transfer": {"deadlineSeconds": 7}}, "both roles, routers"),
    "transfer.contentCheck": ({"spec.transfer": {"contentCheck": "full"}}, "both roles"),
    "transfer.onFailure": ({"spec.transfer": {"onFailure": "fail"}}, "both roles, routers"),
    "transfer.minPushTokens": ({"spec.transfer": {"minPushTokens": 7}}, "decode"),
    "roles.*.engineArgs.block-size": (
        {f"{role}.engineArgs": {"block-size": "32"} for role in (P, D)},
        "both roles",
    ),
    "transfer.port": ({"spec.transfer": {"port": 20200}}, "both roles"),
    "roles.decode.engineArgs.max-num-seqs": ({f"{D}.engineArgs": {"max-num-seqs": "7"}}, "decode"),
    "roles.prefill.parallelism.tensor": ({f"{P}.parallelism": {"tensor": 2}}, "prefill"),
    "roles.decode.resources.limits": ({f"{D}.resources": {"limits": {"memory": "9Gi"}}}, "decode"),
    "roles.decode.env.VLLM_KV_CACHE_LAYOUT": (
        {f"{D}.env": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "LBHNC"}]},
        "both roles",
    ),
    "roles.decode.env": ({f"{D}.env": [{"name": "A", "value": "b"}]}, "decode"),
    "roles.prefill.podOverrides": ({f"{P}.podOverrides": {"spec": {"nodeSelector": {"a": "b"}}}}, "prefill"),
    "drain.timeoutSeconds": ({"spec.drain": {"timeoutSeconds": 7}}, "both roles, routers"),
    "roles.decode.replicas": ({f"{D}.replicas": 3}, "nothing"),
    "rollout.maxSurge": ({"spec.rollout": {"maxSurge": 2}}, "nothing"),
    "scaling.mode": ({"spec.scaling": {"mode": "External"}}, "nothing"),
    "router.replicas": ({"spec.router": {"replicas": 3}}, "nothing"),
    "router.resources": ({"spec.router": {"resources": {"limits": {"memory": "9Gi"}}}}, "routers"),
    "router.requestTimeoutSeconds": ({"spec.router": {"requestTimeoutSeconds": 900}}, "routers"),
    "router.apiKeysSecretRef": ({"spec.router": {"apiKeysSecretRef": {"name": "clients"}}}, "routers"),
    "router.tokens": (
        {"spec.router": {"tokens": {"issuer": "i", "audience": "a", "keySetUrl": "https://host/jwks"}}},
        "routers",
    ),
    "router.policy": ({"spec.router": {"policy": "affinity"}}, "routers"),
    "router.modelAliases": ({"spec.router": {"modelAliases": [{"name": "gpt-4", "model": "tiny"}]}}, "routers"),
    "router.accessLog": ({"spec.router": {"accessLog": True}}, "routers"),
    "router.tls": ({"spec.router": {"tls": {"secretName": "certificate"}}}, "routers"),
    "router.picker": ({"spec.router": {"picker": {"gatewayNamespaces": ["gateways"]}}}, "routers"),
    "router.proxies": ({"spec.router": {"proxies": {"trusted": ["10.0.0.0/8"]}}}, "routers"),
}
"""Field of the page's table to a change of it and what the page says."""


def templates(changes: Mapping[str, object]) -> dict[str, object]:
    """What decides whether a pod is replaced, by whose pod it is."""
    pool = pool_of(make_cluster({"spec.model.servedName": "same", **changes}), "router:1")
    ids = target_of(pool, Observed()).ids
    return {
        "prefill": ids.prefill_template,
        "decode": ids.decode_template,
        "routers": router_deployment(pool)["spec"]["template"],
    }


def planned(changes: Mapping[str, object]) -> set[str]:
    """Who is replaced, as ``pdcluster plan`` tells people."""
    same = {"spec.model.servedName": "same"}
    summary, second, *_ = preview(make_cluster(same), make_cluster({**same, **changes}))
    named = {role for role in ("prefill", "decode") if re.search(rf"\bonly\b.*\b{role}\b.* replaced", summary)}
    engines = {"prefill", "decode"} if "both roles are replaced" in summary else named
    return engines | ({"routers"} if second.startswith("routers are replaced") else set())


@pytest.mark.parametrize("field", REPLACES)
def test_a_change_replaces_what_the_page_says(field: str) -> None:
    changes, said = REPLACES[field]
    before, after = templates({}), templates(changes)
    replaced = {whose for whose in before if before[whose] != after[whose]}
    words = {"both roles": {"prefill", "decode"}, "nothing": set[str]()}
    assert replaced == set[str]().union(*(words.get(part, {part}) for part in said.split(", ")))
    assert planned(changes) == replaced
    assert [row for row in ROWS if row.startswith(f"| `{field}`") and row.endswith(f"| {said} |")]


def test_the_table_of_changes_has_no_row_that_nobody_checks() -> None:
    table = TEXT.split("| field | replaces |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)) == set(REPLACES)


def test_every_alert_has_a_row_with_its_severity() -> None:
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"][0]["rules"]
    wanted = [f"| `{rule['alert']}` | {rule['labels']['severity']} |" for rule in rules]
    assert [row for row in wanted if not [one for one in ROWS if one.startswith(row)]] == []


def test_what_explain_prints_is_what_it_prints() -> None:
    ready = Counts(wanted=1, least=1, replicas=1, updated=1, ready=1, updated_ready=1)
    waiting = Counts(wanted=1, least=1, replicas=1, updated=1)
    problem = (
        "pod tiny-decode-b4c7e7cc-19a2e1bb-6d5f7-x2x8w, container engine: ImagePullBackOff: failed to pull and unpack "
        'image "registry.example.com/engine:1": failed to authorize: 401 Unauthorized'
    )
    problems = Problems(decode=problem)
    facts = Facts(1, "b4c7e7cc-6613c525-19a2e1bb", ready, waiting, 1, 1, 600, problems=problems)
    shown = TEXT.split("```\n")[2].replace("\n  ", " ")
    assert shown.splitlines() == list(explain(reduce_status(facts, None, now=0), facts.generation))


def test_the_page_has_the_commands_that_matter() -> None:
    words = [" ".join(command) for command in commands_of(OPERATIONS)]
    for begin in ("helm -n pdcluster-system upgrade", "helm -n pdcluster-system rollback", "kubectl drain worker-1"):
        assert [one for one in words if one.startswith(begin)], begin
    assert len(words) > 20
