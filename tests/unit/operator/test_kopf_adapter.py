"""What kopf is told to do, and above all what not."""

from __future__ import annotations

import inspect
from typing import Any

import kopf
from kopf._cogs.clients import api as kopf_api

from pdcluster_kube.documents import decode_document
from pdcluster_operator.kopf_adapter import make_kopf_settings


class NeverCopied(dict[str, Any]):
    def __deepcopy__(self, memo: object) -> NeverCopied:
        raise AssertionError("copied")


def test_kopf_copies_no_object_to_find_what_changed_in_it() -> None:
    storage = make_kopf_settings([], timeout_s=1.0, silence_s=1.0).persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "one"}, "spec": NeverCopied(replicas=1)})
    assert storage.build(body=body, extra_fields=set()) == {}
    assert storage.fetch(body=body) is None


def test_kopf_parses_as_we_do() -> None:
    """Answers by their own ``json``, lines of a watch by what its module calls ``json``."""
    own = {name: made for name, made in vars(kopf_api).items() if inspect.isroutine(made) and "json" in namesof(made)}
    assert set(own) == {"get", "post", "patch", "delete", "stream"}
    assert "loads" in namesof(kopf_api.stream)
    assert vars(kopf_api)["json"].loads is decode_document


def namesof(made: Any) -> tuple[str, ...]:
    """What a function of that module names."""
    names: tuple[str, ...] = made.__code__.co_names
    return names if made.__module__ == kopf_api.__name__ else ()


def test_how_long_kopf_may_wait_is_ours_to_say() -> None:
    settings = make_kopf_settings([], timeout_s=3.0, silence_s=7.0)
    assert settings.watching.inactivity_timeout == 7.0
    assert settings.networking.connect_timeout == 3.0
    assert settings.networking.request_timeout == 18.0
