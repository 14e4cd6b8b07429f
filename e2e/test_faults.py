"""Things die while clients ask all the time: what design.md promises of each, and the pool is whole again after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from campaign.outcomes import End
from campaign.questions import Answer, Question
from e2e.cluster import OPERATOR, OPERATOR_NAMESPACE, Cluster, eventually
from e2e.load import Load, lost, summary
from e2e.pool import ROUTER
from e2e.subject import READY_S, SharedPool, Subject, name_of
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

MORE = 40
ANSWERS_S = 300.0
ROUTER_NOTICE_S = 15.0
"""Until kube-proxy sends nothing to a router that was killed, or it runs again."""

Expected = Mapping[Question, Answer]


def test_a_killed_router_cuts_its_own_requests_and_no_other(shared: SharedPool, expected: Expected) -> None:
    shared.take_on()
    pool = shared.subject
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        load.forgive_router()
        pool.cluster.kill(pool.namespace, name_of(pool.routers()[0]), ROUTER)
        time.sleep(ROUTER_NOTICE_S)
        load.resent_router()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    print(f"\nrouter killed: {summary(told)}")
    assert not lost(told, End.ROUTER_LOST)


def test_a_rollout_goes_on_when_the_leading_operator_is_killed_in_it(shared: SharedPool, expected: Expected) -> None:
    shared.take_on()
    pool = shared.subject
    before = {name_of(pod) for pod in pool.pods(Role.DECODE)}
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        shared.change("max-num-batched-tokens", "512", Role.DECODE)
        eventually(lambda: len(pool.pods(Role.DECODE)) == 2, "no new decode engine", 120.0)
        killed = leader(pool.cluster)
        pool.cluster.kill(OPERATOR_NAMESPACE, killed.rsplit("_", 1)[0], "operator")
        assert before & {name_of(pod) for pod in pool.pods(Role.DECODE)}, "the rollout was over before the kill"
        pool.wait_ready()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    print(f"\noperator killed in a rollout: {summary(told)}")
    assert leader(pool.cluster) != killed
    assert not before & {name_of(pod) for pod in pool.pods(Role.DECODE)}
    assert not lost(told)


def test_a_killed_decode_engine_costs_one_clear_error_for_each_answer_that_had_begun(
    shared: SharedPool, expected: Expected
) -> None:
    shared.take_on(decode=2)
    pool = shared.subject
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        killed_at = time.monotonic()
        pool.kill_one(Role.DECODE)
        pool.wait_ready()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    print(f"\ndecode killed: {summary(told)}")
    assert not lost(told, End.ERROR)
    errors = [one for one in told if one.verdict.end is End.ERROR]
    assert all(one.verdict.code.startswith("200 then") for one in errors), "only after its first byte"
    assert all(one.began_at < killed_at + 1 for one in errors), "nobody was sent to the dead engine later"


def test_no_request_is_lost_when_decode_engines_are_drained_from_their_node(
    shared: SharedPool, expected: Expected
) -> None:
    """One node has no other to go to: it takes new pods again as soon as the drain has begun."""
    shared.take_on(decode=2)
    pool = shared.subject
    before = {name_of(pod) for pod in pool.pods(Role.DECODE)}
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        drain_decode(pool)
        pool.wait_ready()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    print(f"\nnode drained: {summary(told)}")
    assert not before & {name_of(pod) for pod in pool.pods(Role.DECODE)}
    assert not lost(told)


def test_no_request_is_lost_when_one_of_two_prefill_engines_is_killed(shared: SharedPool, expected: Expected) -> None:
    shared.take_on(prefill=2)
    pool = shared.subject
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        pool.kill_one(Role.PREFILL)
        pool.wait_ready()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    print(f"\nprefill killed: {summary(told)}")
    assert not lost(told)


def leader(cluster: Cluster) -> str:
    """POD_SOMETHING."""
    return str(cluster.get("lease", OPERATOR, OPERATOR_NAMESPACE)["spec"]["holderIdentity"])


def drain_decode(pool: Subject) -> None:
    """``kubectl drain`` of the node for all of the pool's decode engines, until they are gone."""
    run, node = pool.cluster.run, pool.pods(Role.DECODE)[0]["spec"]["nodeName"]
    selector = f"{labels.CLUSTER}={pool.name},{labels.ROLE}={Role.DECODE.value}"
    words = ("drain", node, f"--pod-selector={selector}", "--delete-emptydir-data", f"--timeout={READY_S:.0f}s")
    with ThreadPoolExecutor(1, thread_name_prefix="drain") as threads:
        draining = threads.submit(run, *words, limit_s=READY_S + 60)
        eventually(lambda: "true" in run("get", "node", node, "-o", "jsonpath={.spec.unschedulable}"), "no drain", 60.0)
        run("uncordon", node)
        draining.result()
