"""Checking a manifest: every fault at once, each with its path and what to write instead."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from tracerl.api import schema
from tracerl.api.errors import Fault, InputError
from tracerl.api.job import API_VERSION, KIND, Spec, TraceRLJob
from tracerl.api.machine import Machine
from tracerl.api.manifest import Location, dotted, json_copy, read_manifest
from tracerl.api.model import ModelShape, model_shape
from tracerl.api.overrides import apply_overrides
from tracerl.api.rules import RULES, Facts, Rule
from tracerl.api.suggest import nearest
from tracerl.api.support import SUPPORT_RULES

__all__ = ["Fault", "apply_overrides", "check", "load_job", "read_manifest"]

_REPAIR_ROUNDS = 6


def check(document: object, *, machine: Machine | None = None) -> list[Fault]:
    """Find every fault of a manifest; an empty list means that it is a job which this version runs.

    Rules that need the model's configuration run where it is at hand. With `machine`, so do those that only
    the machine where the job would start can answer; on a cluster the operator asks them. Never raises.
    """
    return _examine(document, machine)[1]


def load_job(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    machine: Machine | None = None,
    shape_of: Callable[[str], ModelShape | None] | None = None,
) -> TraceRLJob:
    """Read a manifest, apply `path=value` overrides and check it; InputError lists all faults, a line each.

    What the manifest says under `status` is not read: only the operator writes it. With `shape_of`, which
    gives the shape behind spec.model.uri, the job is only to be planned: what no engine here runs is allowed.
    """
    document = apply_overrides(read_manifest(path), overrides)
    return checked_job(document, path, machine=machine, shape_of=shape_of)


def checked_job(
    document: object,
    path: str | os.PathLike[str],
    *,
    machine: Machine | None = None,
    shape_of: Callable[[str], ModelShape | None] | None = None,
) -> TraceRLJob:
    """Check a manifest that was read from `path`, as `load_job` does."""
    if shape_of is None:
        job, faults = _examine(document, machine)
    else:
        job, faults = _examine(document, machine, rules=RULES, shape_of=shape_of)
    if job is None or faults:
        count = f"{len(faults)} fault{'s' if len(faults) != 1 else ''}"
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise InputError(f"{os.fspath(path)} is not a job that can run, {count}:{lines}", faults)
    return job


def _examine(
    document: object,
    machine: Machine | None,
    *,
    rules: Sequence[Rule] = (*RULES, *SUPPORT_RULES),
    shape_of: Callable[[str], ModelShape | None] = model_shape,
) -> tuple[TraceRLJob | None, list[Fault]]:
    if not isinstance(document, dict):
        return None, [Fault("", "the manifest is not a mapping", f"start with apiVersion: {API_VERSION}")]
    written = {key: value for key, value in document.items() if key != "status"}
    values, found = json_copy(written)
    faults = [fault for _, fault in found]
    if values is None:
        return None, faults
    unread = {_field(place) for place, _ in found}
    for key, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        if key not in values:
            faults.append(Fault(key, "is missing", f"add {key}: {value}"))
    job, errors = _parse(values)
    errors += _in_long_lists(values, errors)
    for error in errors:
        place = _place(error)
        if not any(place[: len(bad)] == bad for bad in unread):
            faults.append(_translate(error, place))
    for _ in range(_REPAIR_ROUNDS):
        if job is not None:
            break
        unread |= {bad for error in errors for bad in _unread(error)}
        for error in errors:
            _repair(values, error)
        job, errors = _parse(values)
    if job is None:
        return None, faults
    faults += _broken(job, machine, frozenset(unread), rules, shape_of)
    return job, faults


# -- the schema's faults ----------------------------------------------------------------------------------


def _parse(values: dict[str, Any]) -> tuple[TraceRLJob | None, list[ErrorDetails]]:
    try:
        # JSON and strict, because the API server takes neither "3" for a number nor snake_case names.
        text = json.dumps(values)
        return TraceRLJob.model_validate_json(text, strict=True, by_alias=True, by_name=False), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _in_long_lists(values: dict[str, Any], errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Find the faults of items of lists that are too long: parsing such a list stops at its length."""
    lengths = {
        _place(error): error["ctx"]["max_length"]
        for error in errors
        if error["type"] == "too_long" and isinstance(error["input"], list)
    }
    if not lengths:
        return []
    shorter = copy.deepcopy(values)
    for place, length in lengths.items():
        here: Any = shorter
        for part in place:
            here = here[part]
        del here[length:]
    return [error for error in _parse(shorter)[1] if _field(_place(error)) in lengths]


def _place(error: ErrorDetails) -> Location:
    return tuple(error["loc"])


def _field(place: Location) -> Location:
    """Cut a location at its first list index: rules read lists whole."""
    first = next((depth for depth, part in enumerate(place) if isinstance(part, int)), len(place))
    return place[:first]


def _unread(error: ErrorDetails) -> Iterator[Location]:
    place = _field(_place(error))
    yield place
    if error["type"] == "extra_forbidden":
        meant = nearest(str(place[-1]), schema.properties(_schema_at(place[:-1])))
        if meant is not None:
            yield (*place[:-1], meant)


def _schema_at(place: Location) -> schema.Schema:
    here = schema.root()
    for part in place:
        here = schema.child(here, str(part)) or {}
    return here


def _repair(values: dict[str, Any], error: ErrorDetails) -> None:
    """Take out what did not parse, or put in what is missing, so that rules can run on the rest."""
    place = _field(_place(error))
    in_list = len(place) < len(error["loc"])
    here: Any = values
    for part in place[:-1]:
        here = here.get(part) if isinstance(here, dict) else None
    if not isinstance(here, dict) or not place:
        return
    if error["type"] == "missing" and not in_list:
        here[str(place[-1])] = copy.deepcopy(schema.example(_schema_at(place)))
    else:
        here.pop(str(place[-1]), None)


_A = {
    "object": "a mapping of its fields",
    "map": "a mapping",
    "list": "a list",
    "decimal": 'a decimal in quotes, for example "0.01"',
    "quantity": 'a quantity, for example "256Mi"',
    "integer": "a whole number",
    "boolean": "true or false",
    "text": "text",
    "any": "a value of another type",
}


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            short = value if len(value) <= 60 else value[:60] + "…"
            return json.dumps(short, ensure_ascii=not short.isprintable())
        case _:
            return str(value)


def _translate(error: ErrorDetails, place: Location) -> Fault:
    path, here = dotted(place), _schema_at(place)
    behind, _ = schema.resolve(here)
    context, value = error.get("ctx", {}), _shown(error["input"])
    match error["type"]:
        case "tracerl":
            return Fault(path, context["problem"], context["remedy"])
        case "missing":
            good = schema.example(here)
            add = (
                f"add {place[-1]}: {good}"
                if not isinstance(good, dict)
                else f"add {place[-1]} with {_inline(good)}"
            )
            doc = behind.get("description", "")
            return Fault(path, "is missing", f"{add} ({doc.rstrip('.')})" if doc else add)
        case "extra_forbidden":
            return Fault(path, "is not a field", _instead(place))
        case "enum" | "literal_error":
            values = schema.allowed(here)
            best = nearest(str(error["input"]), [str(allowed) for allowed in values])
            listed = ", ".join(str(allowed) for allowed in values)
            remedy = (
                f"write {best}"
                if best
                else f"write one of {listed}"
                if len(values) > 1
                else f"write {listed}"
            )
            return Fault(
                path, f"is {value}, not one of {listed}" if len(values) > 1 else f"is {value}", remedy
            )
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
            (key, bound), *_ = context.items()
            quote = '"' if schema.kind(here) == "decimal" else ""
            return Fault(
                path, f"is {quote}{error['input']}{quote}", f"write {words[key]} {quote}{bound}{quote}"
            )
        case "string_pattern_mismatch":
            doc = behind.get("description", f"text that matches {context['pattern']}").rstrip(".")
            return Fault(path, f"is {value}, which is not allowed", f"write {doc[:1].lower()}{doc[1:]}")
        case "string_too_long" | "too_long":
            limit, unit = context["max_length"], "characters" if "string" in error["type"] else "items"
            return Fault(path, f"has more than {limit} {unit}", f"write at most {limit}")
        case "string_too_short" | "too_short":
            return Fault(
                path, "is empty", f"write {_A[schema.kind(here)]} with something in it, or remove it"
            )
        case kind if kind.endswith("_type") or kind in {"int_from_float", "int_parsing_size"}:
            remedy = f"write {_A[schema.kind(here)]}"
            if behind.get("required"):
                remedy += f", for example {_inline(schema.example(here))}"
            if error["input"] is None:
                return Fault(path, "is empty", f"remove it, or {remedy}")
            return Fault(path, f"is {value}", remedy)
        case _:
            return Fault(path, f"is {value}: {error['msg']}", "see docs/reference/job.md for what it takes")


def _inline(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(member)}" for key, member in value.items()) + "}"
    return str(value)


def _instead(place: Location) -> str:
    *above, name = place
    siblings = schema.properties(_schema_at(tuple(above)))
    best = nearest(str(name), siblings)
    if best is not None:
        return f"did you mean {best}? write {dotted((*above, best))}"
    elsewhere = [path for path in schema.paths() if path.split(".")[-1] == name]
    if elsewhere:
        return f"write it as {' or '.join(elsewhere[:3])}"
    return f"remove it, or write one of {', '.join(siblings)}"


# -- the rules' faults ------------------------------------------------------------------------------------


class _UnreadError(Exception):
    """A rule read a field that did not parse."""


class _View:
    """A model through which rules read; a field that did not parse ends the rule that reads it."""

    __slots__ = ("_model", "_path", "_unread")

    def __init__(self, model: BaseModel, path: Location, unread: frozenset[Location]) -> None:
        self._model, self._path, self._unread = model, path, unread

    def __getattr__(self, name: str) -> Any:
        path = (*self._path, to_camel(name))
        if path in self._unread:
            raise _UnreadError
        value = getattr(self._model, name)
        return _View(value, path, self._unread) if isinstance(value, BaseModel) else value


def _broken(
    job: TraceRLJob,
    machine: Machine | None,
    unread: frozenset[Location],
    rules: Sequence[Rule],
    shape_of: Callable[[str], ModelShape | None],
) -> list[Fault]:
    shape: ModelShape | None = None
    faults: list[Fault] = []
    # Only rules below spec exist, and one that is missing or no mapping leaves nothing to check.
    if not {(), ("spec",)} & unread:
        if not {("spec", "model"), ("spec", "model", "uri")} & unread:
            try:
                shape = shape_of(job.spec.model.uri)
            except InputError as error:
                problem, _, remedy = str(error).partition("; ")
                faults.append(Fault("spec.model.uri", problem, remedy))
        # A rule is typed on Spec and reads it through the view, which has the same fields.
        facts = Facts(cast(Spec, _View(job.spec, ("spec",), unread)), shape, machine)
        for rule in rules:
            faults += _run(rule, facts)
    return faults


def _run(rule: Rule, facts: Facts) -> Iterator[Fault]:
    try:
        yield from rule.check(facts)
    except _UnreadError:
        return
