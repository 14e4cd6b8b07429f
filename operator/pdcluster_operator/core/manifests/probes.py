"""The probes by which Kubernetes sees whether an engine lives, and the hook that runs before an engine goes.

Startup and liveness ask vLLM's ``/health``: 200 as soon as the model is loaded, 503 when the engine behind the server
has died. An engine with TLS asks for certificates, and kubelets have none. So ``pdcluster ready --alive`` asks the
engine from its own container. Readiness (``pdcluster ready``) also asks decode's side channel: without the side channel
decode would take requests whose KV never comes. A removed pod first runs ``pdcluster drain``. This command returns when
the engine has been idle for longer than routers need to notice, or when the time is over. Then the engine gets its
SIGTERM.
"""

from __future__ import annotations

import shlex
from typing import Final

from pdcluster_operator.core.manifests import pool_tls
from pdcluster_operator.core.manifests.command import PodPlace
from pdcluster_operator.core.manifests.pool import HTTP, PORT, Document, Pool
from pdcluster_protocol.labels import Role

STARTUP_PERIOD_S: Final = 2
"""Seconds. Short, so that a started engine is seen soon: a probe costs only 0.1 ms."""
STARTUP_LIMIT_S: Final = 2 * 3600
"""Seconds after which an engine that has not come up is restarted. Two hours: far more than the largest weights take to
load, and the rollout's progress deadline tells sooner. Not in the spec, where a change would restart engines."""
READY_PERIOD_S: Final = 5
"""Seconds. Long, for each probe starts a process. Routers notice a dead engine by themselves, within a second."""
READY_TIMEOUT_S: Final = 5
"""Seconds: 2 for the engine to answer, the rest for Python to start on a busy node."""
LIVE_PERIOD_S: Final = 10
LIVE_TIMEOUT_S: Final = 5
ALIVE_ANSWER_S: Final = 5
"""Seconds for an engine with TLS to answer."""
ALIVE_TIMEOUT_S: Final = 8
"""Seconds: ``ALIVE_ANSWER_S``, and 3 for Python to start on a busy node."""
LIVE_FAILURES: Final = 6
"""A minute without an answer: a restart takes minutes, so one long garbage collection must not cause it."""

DRAIN_MARGIN_S: Final = 30
"""Seconds from SIGTERM to the end: the connector may take 10 s to close its sessions, vLLM 10 s for its workers."""


def engine_probes(pool: Pool, role: Role) -> Document:
    """The three probes, as fields of a container that answers HTTP."""
    health = _health(pool, role)
    ready = {"exec": {"command": [*_ready_command(pool, role), *pool_tls.command_flags(pool)]}}
    # With TLS each probe starts a process.
    startup_period_s = READY_PERIOD_S if pool.spec.tls else STARTUP_PERIOD_S
    return {
        "startupProbe": {
            **health,
            "periodSeconds": startup_period_s,
            "failureThreshold": STARTUP_LIMIT_S // startup_period_s,
        },
        "readinessProbe": {
            **ready,
            "periodSeconds": READY_PERIOD_S,
            "timeoutSeconds": READY_TIMEOUT_S,
            "failureThreshold": 2,
        },
        "livenessProbe": {
            **health,
            "periodSeconds": LIVE_PERIOD_S,
            "failureThreshold": LIVE_FAILURES,
        },
    }


def _health(pool: Pool, role: Role) -> Document:
    """The startup and liveness probe's action, and its timeout."""
    if pool.spec.tls is None:
        return {"httpGet": {"path": "/health", "port": HTTP}, "timeoutSeconds": LIVE_TIMEOUT_S}
    alive = ["--alive", "--timeout-s", str(ALIVE_ANSWER_S), *pool_tls.command_flags(pool)]
    command = ["pdcluster", "ready", "--role", role.value, "--port", str(PORT), *alive]
    return {"exec": {"command": command}, "timeoutSeconds": ALIVE_TIMEOUT_S}


def _ready_command(pool: Pool, role: Role) -> list[str]:
    """The readiness probe's command. A prefill engine listens on no side channel. In a group the leader asks only the
    ranks in its own pod: if a worker dies, the leader goes too."""
    spec = pool.role(role)
    ranks = spec.ranks // spec.nodes_per_instance
    channels = ["--side-channel-port", str(pool.spec.transfer.port), "--ranks", str(ranks)]
    command = ["pdcluster", "ready", "--role", role.value, "--port", str(PORT)]
    return [*command, *channels] if role is Role.DECODE else command


def drain_hook(pool: Pool, place: PodPlace) -> Document:
    """A container's ``lifecycle``.

    A worker asks its leader, which has the whole instance's requests. When one pod of a group is told to go, LWS
    removes all pods of the group, the leader too (``RecreateGroupOnPodRestart``).
    """
    timeout_s = str(pool.spec.drain.timeout_seconds)
    # The copy of the Secret is for the engine's HTTP server, and a worker has neither.
    folder = pool_tls.FOLDER if place is PodPlace.WORKER else pool_tls.COPY_FOLDER
    flags = pool_tls.command_flags(pool, folder)
    command = ["pdcluster", "drain", "--port", str(PORT), "--timeout-s", timeout_s, *flags]
    if place is PodPlace.WORKER:
        # Kubernetes replaces $(NAME) in a container's arguments, but not in its hooks.
        command = ["sh", "-c", f'exec {shlex.join(command)} --host "$LWS_LEADER_ADDRESS"']
    return {"preStop": {"exec": {"command": command}}}


def grace_s(timeout_s: int) -> int:
    """Grace period of the pod. Kubernetes counts it from the removal, so it includes the drain."""
    return timeout_s + DRAIN_MARGIN_S
