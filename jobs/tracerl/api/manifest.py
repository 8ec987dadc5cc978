"""Reading a manifest: YAML text to plain JSON values, every mistake as a sentence, no input too strange.

What JSON cannot carry is refused, since the API server would not take it either: tags, keys that are not
text, NaN. So are merge keys, and duplicate keys, of which YAML readers silently keep one. Dates stay text.
What YAML 1.2 calls a number is one, as it is for kubectl.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import yaml

from tracerl.api.errors import Fault, InputError

MAX_BYTES = 256 * 1024
"""Largest manifest that `kubectl apply` takes: it keeps a copy in an annotation of this size."""
_MAX_DEPTH = 32
_MAX_VALUES = 20_000

# What SafeLoader raises besides YAMLError for values such as `!!int ""`, `0x_` or 5,000 digits.
_LOADER_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2, without dates, merge keys and duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own class attribute, replaced and not changed)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not text", key.start_mark)
            if key.tag == "tag:yaml.org,2002:merge":
                problem = "merge keys (<<) are not supported: write the fields out"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if (key.tag, key.value) in seen:
                problem = f'the key "{key.value[:80]}" is there twice: remove one'
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # Merges what `<<` names, and construct_mapping has refused merge keys by then.
        del node


# PyYAML follows YAML 1.1, for which 1e-3 is text; kubectl sends it as a number. What both call an integer
# stays one, since these patterns are asked last.
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?0o[0-7]+\Z"), list("-+0"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z"),
    list("-+.0123456789"),
)


class Dumper(yaml.SafeDumper):
    """Writes for readers of YAML 1.1 and 1.2 alike: what one of them takes for a number stands in quotes."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Write shared parts out: anchors are not for everybody who reads this file."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    quoted = '"' if re.fullmatch(r"[-+.0-9].*", value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=quoted)


Dumper.add_representer(str, _text)


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""


def parse_yaml(text: str, source: str) -> Any:
    """Parse one YAML document into Python values; InputError (naming `source`) where it cannot be."""
    try:
        documents = list(yaml.load_all(text, _Loader))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        raise InputError(f"{source} is not valid YAML: {_place(error)}{problem}; correct it there") from None
    except RecursionError:
        raise InputError(f"{source} is nested too deeply; write it flatter") from None
    except _LOADER_ERRORS as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InputError(
            f"{source} holds a value that YAML cannot make ({reason}); put it in quotes"
        ) from None
    if len(documents) > 1:
        raise InputError(f"{source} holds {len(documents)} YAML documents; write one job a file")
    return documents[0] if documents else None


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a YAML (or JSON) file of one job; InputError says in one sentence what is wrong with the file."""
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{name} does not exist; give the path of a job manifest") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a directory; give the path of a job manifest in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{name!r} cannot be read: {reason}; give the path of a readable manifest") from None
    if len(data) > MAX_BYTES:
        raise InputError(
            f"{name} is larger than {MAX_BYTES // 1024} KiB; a job manifest is a short YAML file"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text (byte {error.start}); give a YAML file") from None
    document = parse_yaml(text, name)
    if document is None:
        raise InputError(f"{name} is empty; write a job manifest, for example jobs/examples/canary.yaml")
    if not isinstance(document, dict):
        what = "a list" if isinstance(document, list) else "a single value"
        raise InputError(f"{name} holds {what}, not a job; start with apiVersion, kind, metadata and spec")
    return document


Location = tuple[str | int, ...]


def dotted(path: Location) -> str:
    """Write a path as users do: `spec.method.trace.layers.indices[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w./:@-]{1,80}", part, re.ASCII):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part[:80])}]"
    return text


class _UnboundedError(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def json_copy(document: object) -> tuple[Any, list[tuple[Location, Fault]]]:
    """Copy the part of a document that JSON and the API server can carry; the rest comes as faults.

    A document too deep or too large to go through (YAML aliases make such of a few lines) comes as None and
    the one fault that says so.
    """
    faults: list[tuple[Location, Fault]] = []
    count = 0

    def copy(value: object, path: Location) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_VALUES:
            problem = f"the manifest has more than {_MAX_VALUES} values"
            raise _UnboundedError(Fault("", problem, "remove what is not needed"))
        if len(path) > _MAX_DEPTH:
            raise _UnboundedError(
                Fault(dotted(path[:3]), f"is nested more than {_MAX_DEPTH} deep", "write it flatter")
            )
        if isinstance(value, dict):
            copied = {}
            for key, member in value.items():
                wrong = _not_json(key) if isinstance(key, str) else None
                if not isinstance(key, str):
                    faults.append(
                        (path, Fault(dotted(path), f"has the key {key!r:.80}, not text", "quote it"))
                    )
                elif wrong is not None:
                    faults.append((path, Fault(dotted(path), f"has a key that {wrong[0]}", wrong[1])))
                else:
                    copied[key] = copy(member, (*path, key))
            return copied
        if isinstance(value, list):
            return [copy(member, (*path, index)) for index, member in enumerate(value)]
        wrong = _not_json(value)
        if wrong is not None:
            faults.append((path, Fault(dotted(path), *wrong)))
            return None
        return value

    try:
        return copy(document, ()), faults
    except _UnboundedError as error:
        return None, [((), error.fault)]


def _not_json(value: object) -> tuple[str, str] | None:
    match value:
        case None | bool():
            return None
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return "holds half of a surrogate pair", "write the character itself"
            return None
        case int():
            return None if -(2**63) <= value < 2**63 else ("is beyond 64 bits", "write a smaller number")
        case float():
            return None if math.isfinite(value) else (f"is {value}", "write a finite number")
        case _:
            return f"is a {type(value).__name__}, which JSON has not", "write it as text in quotes"
