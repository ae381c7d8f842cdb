"""Protocol messages as JSON, for the REST twin of the gRPC surface: the .proto says what there is, once for both.

As protobuf's own JSON, with the field names of the .proto, and with 64-bit integers as numbers.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from runtime.errors import InvalidRequest
from serving.http.errors import shown, unknown_parameter

AnyMessage = TypeVar("AnyMessage", bound=Message)
Json = dict[str, Any]

_LONG = {FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64}
_NO_FIELD = re.compile(r'no field named "([^"]*)" at "([^"]*)"\.(.*)', re.DOTALL)  # the fields that there are stand behind it
_QUOTED = re.compile(r"'(\w+)'")
_BAD_FIELD = re.compile(r"Failed to parse (?P<name>\w+) field: (?P<why>.*)", re.DOTALL)
_BAD_VALUE = re.compile(r"(?P<why>.*) at \w+\.(?P<name>[\w.]+)", re.DOTALL)
_TYPES: dict[int, Json] = {
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": "number"},
    FieldDescriptor.CPPTYPE_FLOAT: {"type": "number"},
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    FieldDescriptor.CPPTYPE_INT64: {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
}


def read(body: Any, kind: type[AnyMessage], **given: str) -> AnyMessage:
    """The message that a JSON body says; `given` are fields that the path has said. InvalidRequest names the field."""
    if not isinstance(body, dict):
        raise InvalidRequest("body", f"The body must be a JSON object, not {type(body).__name__}.")
    if twice := sorted(body.keys() & given.keys()):
        raise InvalidRequest(twice[0], f"{twice[0]} stands in the path already; leave it out of the body.")
    try:
        return json_format.ParseDict({**body, **given}, kind())
    except json_format.ParseError as error:
        raise _in_our_words(str(error), body) from error
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise InvalidRequest("body", f"The body does not fit {kind.DESCRIPTOR.name}: {error}.") from error


def _in_our_words(text: str, body: Json) -> InvalidRequest:
    if found := _NO_FIELD.search(text):
        name, place, known = found.groups()
        path = ".".join([*place.split(".")[1:], name[:80]])
        return InvalidRequest(path, unknown_parameter(path, [_snake(one) for one in _QUOTED.findall(known)]))
    if found := _BAD_FIELD.search(text) or _BAD_VALUE.search(text):
        name, why = found["name"], found["why"][:200].rstrip(".")
        value = f"{name} is {shown(body[name])}, which" if name in body else name
        return InvalidRequest(name, f"{value} is not usable: {why}.")
    return InvalidRequest("body", f"The body is not usable: {text[:200].rstrip('.')}.")


def _snake(name: str) -> str:
    return re.sub("([A-Z])", r"_\1", name).lower()


def write(message: Message) -> Json:
    """Every field that has a value, or needs none to be there."""
    text = json_format.MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(text, message.DESCRIPTOR)


def _with_numbers(values: Json, kind: Any) -> Json:
    """64-bit integers leave protobuf's JSON as texts."""
    for name, value in values.items():
        field = kind.fields_by_name[name]
        if field.type in _LONG:
            values[name] = [int(item) for item in value] if isinstance(value, list) else int(value)
        elif _is_own_message(field):
            for item in value if isinstance(value, list) else [value]:
                _with_numbers(item, field.message_type)
    return values


def _is_own_message(field: FieldDescriptor) -> bool:
    message = field.message_type
    return message is not None and not message.GetOptions().map_entry and not message.full_name.startswith("google.")


def schema_of(kind: Any, without: tuple[str, ...] = ()) -> Json:
    """The JSON schema of a message's descriptor, for the OpenAPI document."""
    properties = {field.name: _schema_of_field(field) for field in kind.fields if field.name not in without}
    return {"type": "object", "title": kind.name, "properties": properties, "additionalProperties": False}


def _schema_of_field(field: FieldDescriptor) -> Json:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _schema_of_value(field.message_type.fields_by_name["value"])}
    schema = _schema_of_value(field)
    return {"type": "array", "items": schema} if field.is_repeated else schema


def _schema_of_value(field: FieldDescriptor) -> Json:
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    if field.message_type is None:
        return dict(_TYPES[field.cpp_type])
    if field.message_type.full_name == "google.protobuf.Timestamp":
        return {"type": "string", "format": "date-time"}
    return schema_of(field.message_type)
