"""The resource's JSON schema as a tree that overrides, messages and the reference page walk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from tracerl.api.job import TraceRLJob

Schema = dict[str, Any]


@cache
def root() -> Schema:
    """Give the schema of a whole manifest, with `$ref` still in it."""
    return TraceRLJob.model_json_schema(by_alias=True)


def resolve(schema: Schema) -> tuple[Schema, bool]:
    """Follow `$ref` and strip "or null"; returns the schema behind and whether null is allowed.

    What the field itself says (description, default, unit, …) wins over what its type says.
    """
    nullable = False
    while True:
        if "$ref" in schema:
            target = root()["$defs"][schema["$ref"].removeprefix("#/$defs/")]
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        elif "anyOf" in schema and {"type": "null"} in schema["anyOf"]:
            nullable = True
            others = [member for member in schema["anyOf"] if member != {"type": "null"}]
            outer = {key: value for key, value in schema.items() if key != "anyOf"}
            schema = {**(others[0] if len(others) == 1 else {"anyOf": others}), **outer}
        else:
            return schema, nullable


def properties(schema: Schema) -> dict[str, Schema]:
    """Give the named fields of an object schema; empty for everything else."""
    found: dict[str, Schema] = resolve(schema)[0].get("properties", {})
    return found


def child(schema: Schema, key: str) -> Schema | None:
    """Give the schema under `key` (a field, a map's key or a list's index), None where there is none."""
    behind, _ = resolve(schema)
    if behind.get("type") == "array":
        items: Schema = behind.get("items", {})
        return items if key.isdecimal() else None
    if key in behind.get("properties", {}):
        found: Schema = behind["properties"][key]
        return found
    more = behind.get("additionalProperties", False)
    if more is True or not behind:
        return {}
    return more if isinstance(more, dict) else None


def kind(schema: Schema) -> str:
    """Name the type as messages do: object, map, list, decimal, quantity, integer, boolean, text, any."""
    behind, _ = resolve(schema)
    if "x-kubernetes-int-or-string" in behind:
        return "quantity"
    if "x-tracerl-range" in behind:
        return "decimal"
    match behind.get("type"):
        case "object":
            return "object" if "properties" in behind else "map"
        case "array":
            return "list"
        case "string":
            return "text"
        case str(name):
            return name
        case _:
            return "any"


def allowed(schema: Schema) -> list[Any]:
    """Give the values of an enum or a constant; empty for everything else."""
    behind, _ = resolve(schema)
    return [behind["const"]] if "const" in behind else list(behind.get("enum", []))


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One field of the resource, as the reference page shows it."""

    path: str
    schema: Schema
    nullable: bool
    required: bool


def walk(schema: Schema | None = None, prefix: str = "") -> Iterator[FieldDoc]:
    """Give every field below `schema` (default: the whole manifest), parents before children."""
    behind, _ = resolve(root() if schema is None else schema)
    required = behind.get("required", [])
    for name, member in behind.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        inner, nullable = resolve(member)
        yield FieldDoc(path, inner, nullable, name in required)
        if inner.get("type") == "array":
            yield from walk(inner.get("items", {}), f"{path}[]")
        else:
            yield from walk(inner, path)


@cache
def paths() -> tuple[str, ...]:
    """Give the dotted path of every field that a user writes."""
    return tuple(item.path for item in walk() if not item.path.startswith("status"))


def example(schema: Schema) -> Any:
    """Make a good value for a required field: its example, or an object of its required fields' examples."""
    behind, _ = resolve(schema)
    if "x-tracerl-example" in behind:
        return behind["x-tracerl-example"]
    if behind.get("type") == "object":
        return {name: example(behind["properties"][name]) for name in behind.get("required", [])}
    raise LookupError("a required field without an example")
