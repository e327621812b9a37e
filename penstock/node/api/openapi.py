"""The OpenAPI 3.1 document of the admin API, made from its operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from penstock.node.api.operation import NoQuery, Operation

PREFIX: Final = "/api/v1"

STREAM_TYPE: Final = "application/x-ndjson"
"""Content type of a stream: https://github.com/ndjson/ndjson-spec."""

ERROR: Final = {
    "type": "object",
    "properties": {"error": {"type": "string", "description": "What was wrong, and what to do."}},
    "required": ["error"],
}

_ERRORS: Final = {
    "400": "The request is malformed, or a parameter or the body is not valid.",
    "401": "The node does not know who asks.",
    "403": "The caller lacks the role.",
    "404": "There is no such thing.",
    "409": "The node can't do that in its present state.",
    "412": "It has changed since the caller has read it.",
    "413": "The body is too large.",
    "415": "The body is no JSON.",
    "421": "The listener is not known by the name in the Host header.",
    "429": "Too many requests of this kind are under way.",
    "503": "The node can't tell or do that now. Try again.",
}


def document(operations: Iterable[Operation], version: str) -> dict[str, Any]:
    """Return the document, of types that JSON has.

    Args:
        operations: all of them.
        version: of Penstock.
    """
    operations = list(operations)
    types = [kind for operation in operations for kind in (operation.answer, operation.body) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    remaining = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        answer = next(remaining)
        body = next(remaining) if operation.body is not None else None
        paths.setdefault(PREFIX + operation.path, {})[operation.method.lower()] = _described(operation, answer, body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock admin API",
            "version": version,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Lists and changes what a running node has. Pages are ordered, and `next` of one is `after` of the "
            "following one. Times are in ms since 1970 UTC, durations in ms, and bodies of messages in base64.",
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic"},
                "certificate": {"type": "mutualTLS"},
            },
        },
        "security": [{"token": []}, {"password": []}, {"certificate": []}],
    }


def _described(operation: Operation, answer: dict[str, Any], body: dict[str, Any] | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": f"Role: {operation.role}.",
        "parameters": [*_path_parameters(operation), *_query_parameters(operation)],
        "responses": {
            "200": _answer(operation, answer),
            **{
                status: {
                    "description": why,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
                for status, why in _ERRORS.items()
            },
        },
    }
    if not operation.is_safe:
        described["parameters"].append(
            {
                "name": "If-Match",
                "in": "header",
                "required": False,
                "description": "`version` of what is changed, as it was read, in double quotes, or a list of such versions. "
                "The change is refused if there is another one.",
                "schema": {"type": "string"},
            }
        )
    elif "version" in getattr(operation.answer, "__struct_fields__", ()):
        described["parameters"].append(
            {
                "name": "If-None-Match",
                "in": "header",
                "required": False,
                "description": "`version` as it was read, in double quotes. The answer is 304 while it is the same.",
                "schema": {"type": "string"},
            }
        )
        described["responses"]["304"] = {"description": "The version that the caller knows is the present one."}
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def _answer(operation: Operation, schema: dict[str, Any]) -> dict[str, Any]:
    if operation.is_stream:
        return {
            "description": "A line of JSON after another, each of which is described here, until the caller hangs up.",
            "content": {STREAM_TYPE: {"schema": schema}},
        }
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    if operation.query is NoQuery:
        return []
    _, components = msgspec.json.schema_components([operation.query])
    schema = components[operation.query.__name__]
    required = set(schema.get("required", ()))
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "description": field.pop("description", ""),
            "schema": field,
        }
        for name, field in schema["properties"].items()
    ]
