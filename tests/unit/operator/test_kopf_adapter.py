"""What kopf is told to do, and above all what not."""

from __future__ import annotations

from typing import Any

import kopf

from pdcluster_operator.kopf_adapter import make_kopf_settings


class NeverCopied(dict[str, Any]):
    def __deepcopy__(self, memo: object) -> NeverCopied:
        raise AssertionError("copied")


def test_kopf_copies_no_object_to_find_what_changed_in_it() -> None:
    storage = make_kopf_settings([], timeout_s=1.0, silence_s=1.0).persistence.diffbase_storage
    body = kopf.Body({"metadata": {"name": "one"}, "spec": NeverCopied(replicas=1)})
    assert storage.build(body=body, extra_fields=set()) == {}
    assert storage.fetch(body=body) is None


def test_how_long_kopf_may_wait_is_ours_to_say() -> None:
    settings = make_kopf_settings([], timeout_s=3.0, silence_s=7.0)
    assert settings.watching.inactivity_timeout == 7.0
    assert settings.networking.connect_timeout == 3.0
    assert settings.networking.request_timeout == 18.0
