"""`python -m tracerl.api.crd [FILE]`: writes the CustomResourceDefinition of TraceRLJob from the models.

A structural schema says less than pydantic's: no references, no unions with null, no floats. What follows
from that: an optional field may be absent but not null, except where null means something else than absence
(``gradientClip``), and a decimal's range is a CEL rule over its text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tracerl.api import schema
from tracerl.api.cel import CEL, TEMPLATE_FIELDS
from tracerl.api.job import GROUP, KIND, VERSION, Mutability
from tracerl.api.manifest import Dumper

Node = dict[str, Any]

PLURAL, SINGULAR, SHORT_NAME = "tracerljobs", "tracerljob", "trj"
_COPIED = (
    "type",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
)
_ANYTHING: Node = {"x-kubernetes-preserve-unknown-fields": True}
_TEMPLATES = ("spec.rollout.template", "spec.trainer.template")
_MAPS = 64
"""Most entries of a map that has no bound of its own: rules over it must have a bounded cost."""
# How a decimal's range, as the reference page writes it, is asked of its text.
_RANGES = {
    "": None,
    "> 0": "double(self) > 0.0",
    "≥ 0": "double(self) >= 0.0",
    "≥ 1": "double(self) >= 1.0",
    "0 to 1": "double(self) >= 0.0 && double(self) <= 1.0",
    "≥ 0, < 1": "double(self) >= 0.0 && double(self) < 1.0",
    "> 0, ≤ 0.5": "double(self) > 0.0 && double(self) <= 0.5",
}
_COLUMNS = (
    ("Status", "string", ".status.summary", 0),
    ("Ready", "string", ".status.ready", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Reward", "string", ".status.progress.reward", 0),
    ("Overhead", "string", ".status.progress.overheadRatio", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Queue", "string", ".spec.placement.queue", 1),
    ("Method", "string", ".spec.method.name", 1),
)


def definition() -> Node:
    """Give the whole CustomResourceDefinition."""
    members = schema.properties(schema.root())
    spec = _node(members["spec"], "spec")
    _add_rules(spec)
    _forbid_changes(spec, members["spec"], "spec", spec)
    name = schema.child(members["metadata"], "name") or {}
    root = {
        "type": "object",
        "description": "An RL job whose FP4 rollout and trainer round alike.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {key: name[key] for key in ("type", "pattern", "maxLength")}},
            },
            "spec": spec,
            "status": _status(_node(members["status"], "status")),
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all", "tracerl"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


# -- schemas ----------------------------------------------------------------------------------------------


def _node(member: schema.Schema, path: str, *, required: bool = True) -> Node:
    """Convert the schema of a field and of all below it; a field that is not required gets its default."""
    inner, nullable = schema.resolve(member)
    node: Node = {"description": text} if (text := _description(inner)) else {}
    kind = schema.kind(inner)
    if path in _TEMPLATES:
        node |= _template()
    elif kind == "quantity":
        node |= {key: inner[key] for key in ("x-kubernetes-int-or-string", "pattern", "maxLength")}
    elif kind == "any":
        node |= _ANYTHING
    else:
        node |= {key: inner[key] for key in _COPIED if key in inner}
    if "const" in inner:
        node["enum"] = [inner["const"]]
    if rule := _RANGES[inner.get("x-tracerl-range", "")]:
        message = f"write a decimal {inner['x-tracerl-range']}"
        node["x-kubernetes-validations"] = [{"rule": rule, "message": message}]
    match kind:
        case "list":
            node["items"] = _node(inner["items"], f"{path}[]")
            node["x-kubernetes-list-type"] = "atomic"
        case "object" if inner.get("additionalProperties"):
            # Resources: their typed fields are entries like the others, with a rule each.
            node["additionalProperties"] = _node(inner["additionalProperties"], f"{path}.*")
            node["maxProperties"] = _MAPS
            for name, typed in inner["properties"].items():
                pattern = schema.resolve(typed)[0]["pattern"].replace("\\", "\\\\")
                rule = f"!('{name}' in self) || string(self['{name}']).matches('{pattern}')"
                _require(node, rule, f"{name} is not a quantity of {name}; write for example 2 or 64Gi")
        case "object":
            needed = inner.get("required", [])
            node["properties"] = {
                name: _node(child, f"{path}.{name}", required=name in needed)
                for name, child in inner["properties"].items()
            }
            if needed:
                node["required"] = list(needed)
        case "map" if path not in _TEMPLATES:
            node |= _ANYTHING
        case _:
            pass
    if required:
        return node
    if inner.get("default") is not None:
        node["default"] = inner["default"]
        if nullable:  # null is not the same as leaving it out
            node["nullable"] = True
    elif kind == "object" and not nullable:
        # Spelled out, since rules are tried on a default as it stands.
        below = node.get("properties", {})
        node["default"] = {name: child["default"] for name, child in below.items() if "default" in child}
    return node


def _description(inner: schema.Schema) -> str:
    text = str(inner.get("description", ""))
    if unit := inner.get("x-tracerl-unit"):
        text += f" In {unit}."
    changes = inner.get("x-tracerl-mutability")
    if changes == Mutability.ALWAYS:
        text += " May be changed at any time."
    elif changes == Mutability.WHILE_SUSPENDED:
        text += " May be changed while the job is suspended."
    return text


def _template() -> Node:
    """Give the schema of a patch of a pod template: known where a rule must see it, free elsewhere."""
    known = {name: {"type": kind} for name, kind in TEMPLATE_FIELDS.items()}
    return {
        "type": "object",
        "properties": {
            "metadata": {"type": "object", **_ANYTHING},
            "spec": {"type": "object", **_ANYTHING, "properties": known},
        },
    }


def _status(node: Node) -> Node:
    conditions = node["properties"]["conditions"]
    conditions["x-kubernetes-list-type"] = "map"
    conditions["x-kubernetes-list-map-keys"] = ["type"]
    for holder, names in ((node, ("startTime", "completionTime")),):
        for name in names:
            holder["properties"][name]["format"] = "date-time"
    conditions["items"]["properties"]["lastTransitionTime"]["format"] = "date-time"
    return node


# -- rules ------------------------------------------------------------------------------------------------


def _at(spec: Node, path: str) -> Node:
    """Give the schema at a path that begins with ``spec``."""
    node = spec
    for name in path.split(".")[1:]:
        node = node["properties"][name]
    return node


def _require(node: Node, rule: str, message: str, field: str = "") -> None:
    validation = {"rule": rule, "message": message}
    if field:
        validation["fieldPath"] = field
    node.setdefault("x-kubernetes-validations", []).append(validation)


def _add_rules(spec: Node) -> None:
    for cel in CEL:
        _require(_at(spec, cel.at), cel.expression, cel.message, cel.field)


def _forbid_changes(node: Node, member: schema.Schema, path: str, spec: Node) -> None:
    """Add the transition rules of all fields below an object of which some fields may change."""
    for name, child in schema.properties(member).items():
        inner, nullable = schema.resolve(child)
        below = f"{path}.{name}"
        if inner["x-tracerl-mutability"] == Mutability.WHILE_SUSPENDED:
            rest = below.removeprefix("spec.")
            rule = f"oldSelf.suspend || self.{rest} == oldSelf.{rest}"
            _require(spec, rule, "may be changed while spec.suspend is true", f".{rest}")
        elif inner["x-tracerl-mutability"] == Mutability.IMMUTABLE and not _always(inner):
            target = node["properties"][name]
            if not nullable and _changes_below(inner):
                _forbid_changes(target, child, below, spec)
            elif "default" in target or name in node.get("required", ()):
                _require(target, "self == oldSelf", _immutable(below))
            else:
                same = f"has(self.{name}) == has(oldSelf.{name}) && "
                same += f"(!has(self.{name}) || self.{name} == oldSelf.{name})"
                _require(node, same, _immutable(below), f".{name}")


def _immutable(path: str) -> str:
    return f"{path} cannot be changed; make a new job, by another name, with the new value"


def _always(inner: schema.Schema) -> bool:
    return bool(inner["x-tracerl-mutability"] == Mutability.ALWAYS)


def _changes_below(inner: schema.Schema) -> bool:
    return any(
        item.schema.get("x-tracerl-mutability", Mutability.IMMUTABLE) != Mutability.IMMUTABLE
        for item in schema.walk(inner)
    )


def text() -> str:
    """Give the definition as YAML."""
    head = "# Generated by `python -m tracerl.api.crd` from tracerl.api. Do not edit.\n"
    return head + yaml.dump(definition(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def main() -> None:
    """Write the definition into the file given, crds/tracerljobs.yaml by default."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "crds/tracerljobs.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
