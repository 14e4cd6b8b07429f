"""The picker's messages have the numbers and types of Envoy's own, as xds-protos has them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

import pytest

from gateway.packages import folder_with
from patience import PATIENCE_S
from pdcluster_router.core.requests.consultation import BodyMode
from pdcluster_router.front.picker.messages import APPEND, FIELDS, METHOD, OVERWRITE, SERVICE

_DUMP: Final = """
import json, sys
sys.path.insert(0, sys.argv[1])
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.config.core.v3 import base_pb2 as base
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2 as modes
found = {}
def walk(message):
    if message.name in found or message.file.package == "google.protobuf":
        return
    fields = found[message.name] = {}
    for field in message.fields:
        inner = field.message_type
        is_google = inner and inner.file.package == "google.protobuf"
        kind = inner.full_name if is_google else inner.name if inner else field.type
        fields[field.name] = [field.number, kind, field.is_repeated]
        if inner:
            walk(inner)
for one in (ext_proc.ProcessingRequest, ext_proc.ProcessingResponse):
    walk(one.DESCRIPTOR)
service = ext_proc.DESCRIPTOR.services_by_name["ExternalProcessor"]
print(json.dumps({
    "fields": found,
    "service": [service.full_name, [method.name for method in service.methods]],
    "modes": dict(modes.ProcessingMode.BodySendMode.items()),
    "actions": dict(base.HeaderValueOption.HeaderAppendAction.items()),
}))
"""
_TYPES: Final = {8: "bool", 9: "string", 12: "bytes", 14: "int32"}
"""Protobuf's numbers of types. An enum is a number on the wire."""


@pytest.fixture(scope="module")
def envoys() -> dict[str, Any]:
    command = [sys.executable, "-c", _DUMP, str(folder_with("ext-proc.lock"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_each_field_has_envoys_number_and_type(envoys: dict[str, Any]) -> None:
    theirs = {
        message: {
            name: (
                number,
                ("*" if is_repeated else "") + (kind if isinstance(kind, str) else _TYPES.get(kind, str(kind))),
            )
            for name, (number, kind, is_repeated) in fields.items()
        }
        for message, fields in envoys["fields"].items()
    }
    for message, fields in FIELDS.items():
        assert {name: theirs[message].get(name) for name in fields} == dict(fields), message


def test_the_service_and_the_numbers_of_modes_and_actions_are_envoys(envoys: dict[str, Any]) -> None:
    assert envoys["service"] == [SERVICE, [METHOD]]
    names = {"PARTIAL": "BUFFERED_PARTIAL", "DUPLEX": "FULL_DUPLEX_STREAMED"}
    assert {names.get(mode.name, mode.name): mode.value for mode in BodyMode}.items() <= envoys["modes"].items()
    assert envoys["actions"]["OVERWRITE_IF_EXISTS_OR_ADD"] == OVERWRITE
    assert envoys["actions"]["APPEND_IF_EXISTS_OR_ADD"] == APPEND
