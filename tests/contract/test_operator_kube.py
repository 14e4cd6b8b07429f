"""What the operator's client relies on, of every API server: preconditions, field owners, and which error says what."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from contract.operator_ends import API_SERVERS, MARKS, ApiEnd
from control_plane.plane import ControlPlane
from pdcluster_kube.session import open_session
from pdcluster_operator.clock import micro_time
from pdcluster_operator.errors import Conflict, Exists, NotFound, OwnConflict, Refused, Taken
from pdcluster_operator.http_kube import HttpKube
from pdcluster_operator.kinds import DEPLOYMENT, GROUP_SET, LEASE, SERVICE, SERVICE_ACCOUNT, Kind, Object, Ref, ref_of

pytestmark = pytest.mark.anyio

REAL = "kube-apiserver"


@dataclass
class End:
    """The client, and another one with a name of its own."""

    api: ApiEnd
    kube: HttpKube
    session: aiohttp.ClientSession

    def manifest(self, kind: Kind, name: str = "x", **rest: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": self.api.namespace, **rest.pop("metadata", {})}
        return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **rest}

    def service(self, port: int = 80, **metadata: Any) -> dict[str, Any]:
        ports = [{"name": "http", "port": port, "protocol": "TCP"}]
        return self.manifest(SERVICE, metadata=metadata, spec={"selector": {"app": "x"}, "ports": ports})

    def deployment(self, replicas: int = 1, deadline_s: int = 600, **metadata: Any) -> dict[str, Any]:
        pod = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
        spec = {
            "replicas": replicas,
            "progressDeadlineSeconds": deadline_s,
            "selector": {"matchLabels": {"app": "x"}},
            "template": pod,
        }
        return self.manifest(DEPLOYMENT, metadata=metadata, spec=spec)

    async def edit(self, ref: Ref, patch: object) -> None:
        """Somebody else's change."""
        url = f"{self.api.access.url}{ref.path()}?fieldManager=kubectl-edit"
        headers = {"Content-Type": "application/merge-patch+json"}
        async with self.session.patch(url, data=json.dumps(patch), headers=headers) as response:
            assert response.status == 200, await response.text()

    async def there(self, manifest: Object) -> Object:
        found = await self.kube.get(ref_of(manifest))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def still_plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    with control_plane.without_controllers():
        yield control_plane


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in API_SERVERS])
def opener(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[ApiEnd]:
    return API_SERVERS[request.param](request)


@pytest.fixture
async def end(opener: AbstractAsyncContextManager[ApiEnd]) -> AsyncIterator[End]:
    async with opener as api, open_session(api.access) as session:
        yield End(api, HttpKube(session, api.access.url, timeout_s=10.0, fence=None), session)


async def test_what_is_not_there_is_none(end: End) -> None:
    assert await end.kube.get(Ref(SERVICE, end.api.namespace, "x")) is None


async def test_an_apply_makes_an_object_and_the_same_again_changes_nothing(end: End) -> None:
    first = await end.kube.apply(end.service())
    second = await end.kube.apply(end.service())
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert first["spec"]["ports"][0]["port"] == 80


async def test_a_status_is_stored_only_for_the_state_that_was_seen(end: End) -> None:
    made = await end.kube.apply(end.deployment())
    ref, uid, seen = ref_of(made), made["metadata"]["uid"], made["metadata"]["resourceVersion"]
    stored = await end.kube.apply_status(ref, uid, {"replicas": 1}, resource_version=seen)
    assert stored["status"]["replicas"] == 1
    with pytest.raises(Conflict):
        await end.kube.apply_status(ref, uid, {"replicas": 2}, resource_version=seen)
    assert (await end.there(made))["status"]["replicas"] == 1


async def test_a_field_that_we_apply_no_longer_goes(end: End) -> None:
    await end.kube.apply(end.service(annotations={"a": "b"}))
    await end.kube.apply(end.service())
    assert not (await end.there(end.service()))["metadata"].get("annotations")


async def test_a_field_of_somebody_else_stays_theirs(end: End) -> None:
    await end.kube.apply(end.service())
    ref = ref_of(end.service())
    await end.edit(ref, {"metadata": {"annotations": {"theirs": "1"}}, "spec": {"selector": {"app": "theirs"}}})
    with pytest.raises(Taken, match="kubectl-edit"):
        await end.kube.apply(end.service())
    found = await end.there(end.service())
    assert found["spec"]["selector"] == {"app": "theirs"}
    assert found["metadata"]["annotations"] == {"theirs": "1"}


async def test_a_field_of_somebody_else_is_set_by_force_and_what_they_added_stays(end: End) -> None:
    made = await end.kube.apply(end.service())
    ref, uid = ref_of(made), made["metadata"]["uid"]
    await end.edit(ref, {"metadata": {"annotations": {"theirs": "1"}}, "spec": {"selector": {"app": "theirs"}}})
    with pytest.raises(Taken) as taken:
        await end.kube.apply(end.service(uid=uid))
    [field] = taken.value.fields
    assert field.startswith(".spec.selector")
    assert taken.value.by == ("kubectl-edit",)
    stored = await end.kube.apply(end.service(uid=uid), is_forced=True)
    assert stored["spec"]["selector"] == made["spec"]["selector"]
    assert stored["metadata"]["annotations"] == {"theirs": "1"}
    await end.kube.apply(end.service(uid=uid))


async def test_force_does_not_reach_another_object_than_the_one_that_was_seen(end: End) -> None:
    await end.kube.apply(end.service())
    strange = end.service(port=81, uid="00000000-0000-0000-0000-000000000000")
    with pytest.raises(Conflict):
        await end.kube.apply(strange, is_forced=True)


async def test_an_apply_to_another_object_than_the_one_that_was_seen_is_a_conflict(end: End) -> None:
    made = await end.kube.apply(end.service())
    with pytest.raises(Conflict):
        await end.kube.apply(end.service(port=81, uid="00000000-0000-0000-0000-000000000000"))
    await end.kube.delete(ref_of(end.service()), uid=made["metadata"]["uid"])
    with pytest.raises(Conflict):
        await end.kube.apply(end.service(uid=made["metadata"]["uid"]))
    assert await end.kube.get(ref_of(end.service())) is None


async def test_an_apply_to_an_old_picture_is_a_conflict(end: End) -> None:
    made = await end.kube.apply(end.deployment())
    await end.edit(ref_of(made), {"metadata": {"annotations": {"a": "b"}}})
    with pytest.raises(Conflict):
        await end.kube.apply(end.deployment(deadline_s=9, resourceVersion=made["metadata"]["resourceVersion"]))


async def test_what_is_only_asked_is_not_stored(end: End) -> None:
    await end.kube.ask_create(end.deployment())
    await end.kube.ask_apply(end.service())
    assert await end.kube.get(ref_of(end.deployment())) is None
    made = await end.kube.apply(end.service())
    await end.kube.ask_apply(end.service(port=81))
    assert await end.there(end.service()) == made


async def test_a_field_of_somebody_else_is_no_refusal_of_what_is_only_asked(end: End) -> None:
    """It would be taken back."""
    made = await end.kube.apply(end.service())
    await end.edit(ref_of(made), {"spec": {"selector": {"app": "theirs"}}})
    await end.kube.ask_apply(end.service(uid=made["metadata"]["uid"]))
    assert (await end.there(end.service()))["spec"]["selector"] == {"app": "theirs"}


async def test_what_is_only_asked_is_refused_as_if_it_were_to_be_stored(end: End) -> None:
    await end.kube.create(end.service())
    with pytest.raises(Exists):
        await end.kube.ask_create(end.service())
    deployed = await end.kube.apply(end.deployment())
    with pytest.raises(Conflict):
        await end.kube.ask_apply(end.deployment(deadline_s=9, uid="00000000-0000-0000-0000-000000000000"))
    assert await end.there(deployed) == deployed


@pytest.mark.parametrize("opener", [pytest.param(REAL, marks=MARKS[REAL])], indirect=True)
async def test_a_field_that_nobody_knows_is_refused_and_not_dropped(end: End) -> None:
    """As in a misspelled ``podOverrides``. The fake takes any field."""
    misspelled = end.deployment()
    misspelled["spec"]["template"]["spec"]["containers"][0]["imag"] = "x"
    for write in (end.kube.ask_create, end.kube.create):
        with pytest.raises(Refused, match=r'unknown field "spec\.template\.spec\.containers\[0\]\.imag"'):
            await write(misspelled)
    assert await end.kube.get(ref_of(misspelled)) is None


async def test_what_we_created_or_scaled_ourselves_does_not_stand_in_the_way_of_an_apply(end: End) -> None:
    made = await end.kube.create(end.deployment())
    ref = ref_of(made)
    version = await end.kube.scale(ref, 3, resource_version=made["metadata"]["resourceVersion"])
    with pytest.raises(OwnConflict):
        await end.kube.apply(end.deployment(replicas=3, deadline_s=700))  # Perhaps the picture was old.
    applied = await end.kube.apply(end.deployment(replicas=3, deadline_s=700, resourceVersion=version))
    assert applied["spec"]["progressDeadlineSeconds"] == 700
    assert applied["spec"]["replicas"] == 3


async def test_a_scale_that_was_decided_on_an_old_picture_is_a_conflict(end: End) -> None:
    made = await end.kube.create(end.deployment())
    ref, version = ref_of(made), made["metadata"]["resourceVersion"]
    after = await end.kube.scale(ref, 2, resource_version=version)
    assert after != version
    with pytest.raises(Conflict):
        await end.kube.scale(ref, 5, resource_version=version)
    found = await end.there(made)
    assert found["spec"]["replicas"] == 2
    assert found["metadata"]["resourceVersion"] == after


async def test_a_second_create_says_that_there_is_one(end: End) -> None:
    await end.kube.create(end.service())
    with pytest.raises(Exists):
        await end.kube.create(end.service())


async def test_only_the_object_that_was_seen_is_deleted_and_none_is_no_error(end: End) -> None:
    made = await end.kube.apply(end.manifest(SERVICE_ACCOUNT))
    ref = ref_of(made)
    with pytest.raises(Conflict):
        await end.kube.delete(ref, uid="00000000-0000-0000-0000-000000000000")
    await end.kube.delete(ref, uid=made["metadata"]["uid"])
    await end.kube.delete(ref, uid=made["metadata"]["uid"])
    assert await end.kube.get(ref) is None


async def test_of_two_who_replace_the_same_lease_one_wins(end: End) -> None:
    def lease(holder: str, **metadata: Any) -> dict[str, Any]:
        return end.manifest(LEASE, metadata=metadata, spec={"holderIdentity": holder, "renewTime": micro_time()})

    made = await end.kube.create(lease("a"))
    version = made["metadata"]["resourceVersion"]
    await end.kube.replace(lease("b", resourceVersion=version))
    with pytest.raises(Conflict):
        await end.kube.replace(lease("c", resourceVersion=version))
    assert (await end.there(made))["spec"]["holderIdentity"] == "b"


async def test_lists_show_metadata_of_what_a_selector_chooses(end: End) -> None:
    await end.kube.apply(end.manifest(SERVICE_ACCOUNT, "one", metadata={"labels": {"app": "x"}}))
    await end.kube.apply(end.manifest(SERVICE_ACCOUNT, "two"))
    [listed] = await end.kube.list_metadata(SERVICE_ACCOUNT, end.api.namespace, "app=x")
    there = await end.kube.get(Ref(SERVICE_ACCOUNT, end.api.namespace, "one"))
    assert there is not None
    assert (listed.name, listed.namespace, listed.uid) == ("one", end.api.namespace, there["metadata"]["uid"])


async def test_each_page_of_a_list_shows_what_the_selector_chooses(end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdcluster_operator.http_kube.PAGE_OBJECTS", 1)
    for name, app in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "x")):
        await end.kube.apply(end.manifest(SERVICE_ACCOUNT, name, metadata={"labels": {"app": app}}))
    listed = await end.kube.list_metadata(SERVICE_ACCOUNT, end.api.namespace, "app=x")
    assert [one.name for one in listed] == ["a", "c", "d"]


async def test_it_says_which_kinds_there_are(end: End) -> None:
    assert await end.kube.serves(DEPLOYMENT)
    assert not await end.kube.serves(GROUP_SET)


async def test_a_kind_that_is_not_there_is_not_found(end: End) -> None:
    with pytest.raises(NotFound):
        await end.kube.apply(end.manifest(GROUP_SET, spec={}))
