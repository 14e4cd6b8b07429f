"""The messages of Envoy's external processing that the picker reads and writes, with their fields' numbers.

Written down here, because PyPI's package of Envoy's types, xds-protos, also brings an old copy of OpenTelemetry's, in
the very files of the package that the extra ``otlp`` needs. Fields that the picker neither reads nor writes are left
out: protobuf skips them in what comes.

Source of truth: Envoy 1.40 ``envoy/service/ext_proc/v3/external_processor.proto``, ``envoy/config/core/v3/base.proto``
and ``envoy/type/v3/http_status.proto``, as xds-protos 1.85 has them; ``tests/contract/test_ext_proc.py`` compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"
OVERWRITE: Final = 2
"""``HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD``."""
APPEND: Final = 0
"""``HeaderAppendAction.APPEND_IF_EXISTS_OR_ADD``."""

_STRUCT: Final = "google.protobuf.Struct"
FIELDS: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "Metadata": {"filter_metadata": (1, "*FilterMetadataEntry")},
    "FilterMetadataEntry": {"key": (1, "string"), "value": (2, _STRUCT)},
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption"), "remove_headers": (2, "*string")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "BodyMutation": {"body": (1, "bytes"), "streamed_response": (3, "StreamedBodyResponse")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "HttpStatus": {"code": (1, "int32")},
}
"""Message to field to number and type; ``*``: there may be several. Enums are numbers, which look the same on the wire,
and so do a map and its entries."""

_ONE_OF: Final = {"ProcessingRequest": range(2, 8), "ProcessingResponse": range(1, 8), "BodyMutation": range(1, 4)}
"""The numbers of the fields of which a message has one."""
_PACKAGE: Final = "pdcluster.ext_proc"
"""Not Envoy's: a process may have imported Envoy's own types as well."""
_Field: Final = descriptor_pb2.FieldDescriptorProto
_PLAIN: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
}


def _described() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="pdcluster/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name="choice")
        for field, (number, kind) in fields.items():
            _describe(message.field.add(name=field, number=number), kind)
            if number in _ONE_OF.get(name, ()):
                message.field[-1].oneof_index = 0
    return file


def _describe(field: Any, kind: str) -> None:
    bare = kind.lstrip("*")
    field.label = _Field.LABEL_REPEATED if kind != bare else _Field.LABEL_OPTIONAL
    field.type = _PLAIN.get(bare, _Field.TYPE_MESSAGE)
    if bare not in _PLAIN:
        field.type_name = f".{bare}" if bare == _STRUCT else f".{_PACKAGE}.{bare}"


def _class_of(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_POOL: Final = descriptor_pool.DescriptorPool()
_POOL.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_POOL.Add(_described())
ProcessingRequest: Final = _class_of("ProcessingRequest")
ProcessingResponse: Final = _class_of("ProcessingResponse")
