"""`--set path=value`: changing a manifest on the command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tracerl.api import schema
from tracerl.api.errors import InputError
from tracerl.api.manifest import json_copy, parse_yaml
from tracerl.api.suggest import nearest

_LIST_ADVICE = "count from 0 and add at most one item"


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Give a copy of the manifest with every `path=value` applied in order.

    A path is dotted from the top (`spec.algorithm.steps`), list items by index
    (`spec.quantization.targets.0` or `targets[0]`); an index one past the end adds an item. A value is YAML;
    where the field is text, a decimal string or a quantity, numbers stay text. InputError lists all that
    cannot be applied, a line each, and names the nearest field where there is no such path.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    refused = []
    for override in overrides:
        try:
            _apply(changed, override)
        except InputError as error:
            refused.append(str(error))
    if len(refused) > 1:
        lines = "".join(f"\n  {sentence}" for sentence in refused)
        raise InputError(f"{len(refused)} of {len(overrides)} changes cannot be made:{lines}")
    if refused:
        raise InputError(refused[0])
    return changed


def _apply(changed: dict[str, Any], override: str) -> None:
    path, sign, text = override.partition("=")
    if not sign:
        raise InputError(
            f"--set {override!r} has no =; write --set {override or 'spec.algorithm.steps'}=VALUE"
        )
    keys = re.sub(r"\[([0-9]+)\]", r".\1", path.strip()).split(".")
    if "" in keys:
        raise InputError(f"--set {override[:200]!r} has an empty name in its path; write spec.FIELD=VALUE")
    target = _target(keys, override)
    value = parse_yaml(text, f"the value of --set {path}")
    for _, fault in json_copy(value)[1]:
        raise InputError(f"--set {override[:200]!r}: the value {fault.problem}; {fault.remedy}")
    _put(changed, keys, _as_written(value, text, target), override)


def _target(keys: list[str], override: str) -> schema.Schema:
    place = schema.root()
    for depth, key in enumerate(keys):
        below = schema.child(place, key)
        if below is None:
            raise InputError(f"--set {override!r}: {_unknown(place, keys, depth)}")
        place = below
    return place


def _unknown(place: schema.Schema, keys: list[str], depth: int) -> str:
    tried = ".".join(keys[: depth + 1])
    if schema.kind(place) == "list":
        return f"{tried} is not an item of a list; {_LIST_ADVICE}"
    siblings = schema.properties(place)
    if not siblings:
        return f"{'.'.join(keys[:depth])} has no fields below it; set it itself"
    best = nearest(keys[depth], siblings)
    if best is not None:
        suggestion = ".".join([*keys[:depth], best, *keys[depth + 1 :]])
    else:
        wanted = ".".join(keys[depth:])
        elsewhere = [path for path in schema.paths() if path.endswith(f".{wanted}")]
        elsewhere = elsewhere or [path for path in schema.paths() if path.endswith(f".{keys[-1]}")]
        suggestion = " or ".join(elsewhere[:3]) or nearest(".".join(keys), schema.paths()) or ""
    if suggestion:
        return f"there is no field {tried}; did you mean {suggestion}?"
    return f"there is no field {tried}; write one of {', '.join(siblings)}"


def _as_written(value: Any, text: str, target: schema.Schema) -> Any:
    """Keep numbers as text where the field is text, and so down a whole object."""
    kind = schema.kind(target)
    if kind in {"decimal", "quantity", "text"} and isinstance(value, int | float):
        if isinstance(value, bool):
            return value
        return text.strip() or value
    if isinstance(value, dict):
        return {
            key: _as_written(member, str(member), schema.child(target, str(key)) or {})
            for key, member in value.items()
        }
    if isinstance(value, list):
        return [_as_written(member, str(member), schema.child(target, "0") or {}) for member in value]
    return value


def _put(document: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    place: Any = document
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        here = ".".join(keys[:depth]) or "the manifest"
        if isinstance(place, list):
            index = int(key) if key.isdecimal() and len(key) < 6 else len(place) + 1
            if index > len(place):
                raise InputError(f"--set {override!r}: {here} has {len(place)} items; {_LIST_ADVICE}")
            if index == len(place):
                place.append(None)
            if last:
                place[index] = value
            elif place[index] is None:
                place[index] = {}
            place = place[index]
        elif isinstance(place, dict):
            if last:
                place[key] = value
            elif place.get(key) is None:
                place[key] = [] if keys[depth + 1].isdecimal() else {}
            place = place[key]
        else:
            raise InputError(
                f"--set {override!r}: {here} is a single value in the manifest; set it as a whole first"
            )
