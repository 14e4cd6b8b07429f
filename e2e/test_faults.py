"""Things die while clients ask all the time: what design.md promises of each, and the pool is whole again after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from campaign.outcomes import End
from campaign.questions import Answer, Question
from e2e.cluster import OPERATOR, OPERATOR_NAMESPACE, Cluster, eventually
from e2e.leaving import Departure, Leaving, hasty, late, spans, wait_begun, wait_idle
from e2e.load import ONE_IS_A_STREAM, Load, Told, crowd, lost, summary
from e2e.pool import ROUTER
from e2e.subject import READY_S, SharedPool, Subject, name_of
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

MORE = 40
FEW = 16
"""Two for each of a crowd."""
ANSWERS_S = 300.0
ROUTER_NOTICE_S = 15.0
"""Until kube-proxy sends nothing to a router that was killed, or it runs again."""
KILL_S = 2.0
"""From when the order was given until the kernel has carried it out."""

Expected = Mapping[Question, Answer]


def test_a_killed_router_cuts_its_own_requests_and_no_other(shared: SharedPool, expected: Expected) -> None:
    shared.take_on()
    pool = shared.subject
    with Load(pool.place(), expected) as load:
        load.wait_for(MORE, ANSWERS_S)
        load.forgive_router()
        pool.cluster.kill(pool.namespace, name_of(pool.routers()[0]), ROUTER)
        killed_at = time.monotonic()
        time.sleep(ROUTER_NOTICE_S)
        load.resent_router()
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    wait_idle(pool)
    print(f"\nrouter killed: {summary(told)}")
    assert not lost(told, End.ROUTER_LOST)
    cut = [one for one in told if one.verdict.end is End.ROUTER_LOST]
    late = [one for one in cut if one.began_at > killed_at + KILL_S]
    assert all("ConnectionRefused" in one.verdict.detail for one in late), "the other router cut one"


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
    """Answers are long, so that nearly every stream of the dead engine had begun; what had not is asked elsewhere. The
    engine that dies is one at which a stream has begun: on a busy machine the other may have all."""
    shared.take_on(decode=2)
    pool, before = shared.subject, shared.subject.serving(Role.DECODE)
    with crowd(pool.place(), pool.expect_long(expected)) as load:
        load.wait_for(FEW, ANSWERS_S)
        pool.kill(wait_begun(pool, Role.DECODE, ONE_IS_A_STREAM, ANSWERS_S))
        killed_at = time.monotonic()
        load.wait_for(FEW, ANSWERS_S)
        told = load.stop()
    wait_idle(pool)
    after = ask_until_whole(pool, Role.DECODE, before, expected)
    print(f"\ndecode killed: {summary(told)}; until it is back: {summary(after)}")
    errors = [one for one in told if one.verdict.end is End.ERROR]
    assert errors, "nothing had begun"
    assert not lost(told, End.ERROR)
    assert all(one.verdict.code.startswith("200 then") for one in errors), "only after its first byte"
    assert all(one.began_at < killed_at for one in errors), "nobody was sent to the dead engine later"
    assert not lost(after)


def test_no_request_is_lost_when_a_node_is_drained_of_the_whole_pool(shared: SharedPool, expected: Expected) -> None:
    """Engines of both roles and routers. One node has no other to go to: it takes new pods again as soon as the drain
    has begun."""
    shared.take_on(prefill=2, decode=2)
    pool = shared.subject
    engines, routers = names([pod for role in Role for pod in pool.pods(role)]), names(pool.routers())
    with Load(pool.place(), pool.expect_long(expected)) as load:
        load.wait_for(FEW, ANSWERS_S)
        left = drain_node(pool, len(engines))
        pool.wait_ready()
        load.wait_for(FEW, ANSWERS_S)
        told = load.stop()
    print(f"\nnode drained: {summary(told)}; {spans(left)}")
    assert {one.pod for one in left} == engines
    assert not routers & names(pool.routers())
    assert not lost(told)
    assert not late(left)
    assert not hasty(left)


def test_no_request_is_lost_when_one_of_two_prefill_engines_is_killed(shared: SharedPool, expected: Expected) -> None:
    """All ask for one token, so that prefill engines always have prompts in their hands."""
    shared.take_on(prefill=2)
    pool, before = shared.subject, shared.subject.serving(Role.PREFILL)
    with crowd(pool.place(), {question: expected[question] for question in shorter(expected)}) as load:
        load.wait_for(MORE, ANSWERS_S)
        pool.kill_one(Role.PREFILL)
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    wait_idle(pool)
    after = ask_until_whole(pool, Role.PREFILL, before, expected)
    print(f"\nprefill killed: {summary(told)}; until it is back: {summary(after)}")
    assert not lost(told)
    assert not lost(after)


def ask_until_whole(pool: Subject, role: Role, before: set[str], expected: Expected) -> list[Told]:
    """What clients were told from the kill on, until the pool is whole and for some answers more."""
    with Load(pool.place(), expected) as load:
        pool.wait_whole(role, before)
        load.wait_for(MORE, ANSWERS_S)
        told = load.stop()
    wait_idle(pool)
    return told


def shorter(expected: Expected) -> list[Question]:
    """Every prompt, with one token wanted."""
    return [question for question in expected if question.max_tokens == 1]


def leader(cluster: Cluster) -> str:
    """POD_SOMETHING."""
    return str(cluster.get("lease", OPERATOR, OPERATOR_NAMESPACE)["spec"]["holderIdentity"])


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {name_of(pod) for pod in pods}


def drain_node(pool: Subject, num_engines: int) -> list[Departure]:
    """``kubectl drain`` of the node for all of the pool, which has so many engines, until they are gone."""
    run, node = pool.cluster.run, pool.pods(Role.DECODE)[0]["spec"]["nodeName"]
    words = ("--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={labels.CLUSTER}={pool.name}")
    with Leaving(pool) as leaving, ThreadPoolExecutor(1, thread_name_prefix="drain") as threads:
        draining = threads.submit(run, "drain", node, *words, f"--timeout={READY_S:.0f}s", limit_s=READY_S + 60)
        eventually(lambda: "true" in run("get", "node", node, "-o", "jsonpath={.spec.unschedulable}"), "no drain", 60.0)
        run("uncordon", node)
        left = leaving.wait_gone(num_engines, READY_S)
        draining.result()
    return left
