"""The reference page of the admin API, made from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def api_page(note: str, document: dict[str, Any]) -> str:
    """Return the page: the operations of each resource, then the types.

    Args:
        note: the first line of a generated page.
        document: the OpenAPI document.
    """
    parts = [
        note,
        "# Admin API",
        document["info"]["description"] + " The admin listener serves it to callers with a [role]"
        "(../guides/security.md#admin-who-may-look), and `control.sock` in the data directory to the user of the node. "
        "[openapi.json](openapi.json) is the OpenAPI document, which a node has at `/api/v1/openapi.json`.",
    ]
    for tag, operations in _by_tag(document).items():
        parts += [f"## {tag}", _table(("operation", "role", "what it does", "takes", "answers"), map(_row, operations))]
    parts.append("## Types")
    for name, schema in sorted(document["components"]["schemas"].items()):
        if fields := schema.get("properties"):
            described = [(f"`{field}`", _kind(value), value.get("description", "")) for field, value in fields.items()]
            parts += [f"### {name}", schema.get("description", ""), _table(("field", "type", ""), described)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _by_tag(document: dict[str, Any]) -> dict[str, list[tuple[str, str, dict[str, Any]]]]:
    """Return method, path and description of each operation, by the resource that it belongs to."""
    tags: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            tags.setdefault(described["tags"][0], []).append((method.upper(), path, described))
    return dict(sorted(tags.items()))


def _row(operation: tuple[str, str, dict[str, Any]]) -> tuple[str, ...]:
    method, path, described = operation
    (answer,) = (content["schema"] for content in described["responses"]["200"]["content"].values())
    role = described["description"].removeprefix("Role: ").rstrip(".")
    return f"`{method} {path}`", role, described["summary"], "; ".join(_taken(described)), _kind(answer)


def _taken(described: dict[str, Any]) -> Iterator[str]:
    """Yield the body and the parameters that an operation takes, without the parts of its path."""
    if "requestBody" in described:
        yield _kind(described["requestBody"]["content"]["application/json"]["schema"])
    if names := [f"`{each['name']}`" for each in described["parameters"] if each["in"] == "query"]:
        yield ", ".join(names)


def _kind(schema: dict[str, Any] | bool) -> str:
    """Return the type that a schema describes, with a link if it has a name. The schema True stands for anything."""
    if isinstance(schema, bool):
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
