"""A pool under test: where it answers, which pods it has, what its status says; and the one that stories share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from campaign.questions import Answer, Question, ask_single_engine
from e2e.cluster import Cluster, eventually
from e2e.load import Place
from e2e.pool import ENGINE, with_engine_arg, with_replicas
from pdcluster_protocol import labels
from pdcluster_protocol.labels import Role

Object = dict[str, Any]

READY_S: Final = 300.0
"""From apply to Ready, and for a whole rollout: half a minute and one, on two cores that others use too."""
PORT: Final = 8000
INTERNAL_PORT: Final = 8001
"""Of a router's pod: its metrics are there."""
LONG_ANSWER: Final = 200
"""Tokens."""
_KIND: Final = "pdcluster"
_LEFTOVERS: Final = (
    "deployments,replicasets,pods,services,endpointslices,secrets,serviceaccounts,roles,rolebindings,"
    "poddisruptionbudgets,networkpolicies,pdrolescalers.pdcluster.dev"
)


@dataclass(frozen=True, slots=True)
class Subject:
    """One PDCluster that was applied."""

    cluster: Cluster
    name: str
    namespace: str = "default"

    def apply(self, pool: Object) -> None:
        self.cluster.apply(pool)

    def get(self) -> Object:
        return self.cluster.get(_KIND, self.name, self.namespace)

    def wait_ready(self, limit_s: float = READY_S) -> None:
        """``Ready`` is true, of the spec as it is now.

        Raises:
            TimeoutError: With all that a person would look at.
        """
        try:
            eventually(self.is_ready, f"{self.name} is not Ready", limit_s)
        except TimeoutError as error:
            found = "\n".join(f"{one['type']}={one['status']} {one['message']}" for one in self.conditions())
            raise TimeoutError(f"{error}\n{found}\n{self.cluster.story(self.namespace)}") from error

    def is_ready(self) -> bool:
        """Of the newest generation, and nothing moves any more."""
        found = self.get()
        generation = found["metadata"]["generation"]
        told = {one["type"]: one for one in found.get("status", {}).get("conditions", [])}
        return (
            all(one["observedGeneration"] == generation for one in told.values())
            and told.get("Ready", {}).get("status") == "True"
            and told.get("Progressing", {}).get("reason") == "RolloutComplete"
        )

    def conditions(self) -> list[Object]:
        found: list[Object] = self.get().get("status", {}).get("conditions", [])
        return found

    def pods(self, role: Role) -> list[Object]:
        """Those that are not going."""
        selector = f"{labels.CLUSTER}={self.name},{labels.ROLE}={role.value}"
        found = self.cluster.items("pods", self.namespace, selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def engines(self) -> list[Object]:
        """All of both roles, also those that are going."""
        return self.cluster.items("pods", self.namespace, f"{labels.CLUSTER}={self.name},{labels.ROLE}")

    def serving(self, role: Role) -> set[str]:
        """The containers of engines that are ready: a restarted one is another."""
        told = [status for pod in self.pods(role) for status in pod["status"].get("containerStatuses", [])]
        return {status["containerID"] for status in told if status["ready"]}

    def kill_one(self, role: Role) -> None:
        """The first engine of this role is killed."""
        self.kill(name_of(self.pods(role)[0]))

    def kill(self, pod: str) -> None:
        """This engine is killed."""
        self.cluster.kill(self.namespace, pod, ENGINE)

    def wait_whole(self, role: Role, before: set[str]) -> None:
        """Another life has come in the place of one of those that served ``before``, and the pool is Ready."""
        eventually(lambda: len(self.serving(role) - before) == 1, f"no {role.value} engine came", READY_S)
        self.wait_ready()

    def routers(self) -> list[Object]:
        selector = f"{labels.CLUSTER}={self.name},{labels.COMPONENT}=router"
        return self.cluster.items("pods", self.namespace, selector)

    def place(self) -> Place:
        """The routers' Service."""
        spec = self.cluster.get("service", f"{self.name}-router", self.namespace)["spec"]
        return Place(spec["clusterIP"], spec["ports"][0]["port"])

    def expect_long(self, questions: Mapping[Question, Answer]) -> dict[Question, Answer]:
        """Every prompt of these, with an answer so long that most of its life is a stream that has begun."""
        prompts = dict.fromkeys(question.prompt for question in questions)
        return self.ask_prefill_alone(tuple(Question(prompt, LONG_ANSWER) for prompt in prompts))

    def ask_prefill_alone(self, questions: tuple[Question, ...]) -> dict[Question, Answer]:
        """What one engine says that does all by itself: prefill's, asked past the routers."""
        address = self.pods(Role.PREFILL)[0]["status"]["podIP"]
        return ask_single_engine(f"http://{address}:{PORT}", questions)

    def leftovers(self) -> list[str]:
        """Whatever bears this pool's label."""
        found = self.cluster.items(_LEFTOVERS, self.namespace, f"{labels.CLUSTER}={self.name}")
        return [f"{one['kind']} {one['metadata']['name']}" for one in found]


class SharedPool:
    """One pool that lives through many stories: each takes it on as the one before left it, since an engine's start is
    what costs. One thread owns it."""

    def __init__(self, subject: Subject, wanted: Object) -> None:
        """Nothing is applied yet."""
        self.subject = subject
        self.wanted = wanted

    def apply(self, wanted: Object) -> None:
        self.wanted = wanted
        self.subject.apply(wanted)

    def take_on(self, prefill: int = 1, decode: int = 1) -> None:
        """It is Ready, with so many engines.

        Raises:
            TimeoutError: See ``Subject.wait_ready``.
        """
        self.ask_for(prefill, decode)
        self.subject.wait_ready()

    def ask_for(self, prefill: int = 1, decode: int = 1) -> None:
        """So many engines are wanted. Does not wait for them."""
        self.apply(with_replicas(self.wanted, prefill=prefill, decode=decode))

    def change(self, name: str, value: str, *roles: Role) -> None:
        """An argument of these roles' engines is asked for."""
        self.apply(with_engine_arg(self.wanted, name, value, [role.value for role in roles]))


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])
