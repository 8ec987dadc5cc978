"""Strategic-merge patches of a pod template, as kubectl and Kustomize do them.

Maps merge, null removes a key, ``$patch: replace`` and ``$patch: delete`` replace or remove a map. Lists are
replaced, except those that Kubernetes merges by a key: their items merge, and an item with ``$patch: delete``
goes. Knows the lists of a pod template and nothing of jobs.
"""

from __future__ import annotations

import copy
from typing import Any

# From the patchStrategy and patchMergeKey tags of k8s.io/api/core/v1.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "ownerReferences": "uid",
}
_DIRECTIVE = "$patch"


class PatchError(ValueError):
    """A patch that does not fit; the message is for the user and begins with the path."""


def strategic_merge(base: dict[str, Any], patch: dict[str, Any], path: str) -> dict[str, Any]:
    """Merge a patch over a document and return a new one; PatchError names the place below `path`."""
    merged = _merge(base, patch, path)
    if not isinstance(merged, dict):
        raise PatchError(f"{path} removes the pod template; remove the directive {_DIRECTIVE}")
    return merged


def _merge(base: Any, patch: Any, path: str) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    patch = dict(patch)
    match patch.pop(_DIRECTIVE, None):
        case None:
            pass
        case "replace":
            base = {}
        case "delete":
            return None
        case other:
            raise PatchError(f"{path}.{_DIRECTIVE} is {str(other)[:40]!r}; write replace or delete")
    if base is not None and not isinstance(base, dict):
        raise PatchError(f"{path} is a mapping, where a pod template has none; remove it")
    merged: dict[str, Any] = dict(base or {})
    for key, value in patch.items():
        here = f"{path}.{key}"
        name = str(key)
        if name.startswith("$"):
            raise PatchError(f"{here} is a directive that is not known here; use {_DIRECTIVE}")
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, list) and name in _MERGE_KEYS:
            merged[key] = _merge_list(merged.get(key), value, _MERGE_KEYS[name], here)
        elif isinstance(merged.get(key), list) and not isinstance(value, list):
            raise PatchError(f"{here} is not a list; write a list")
        elif isinstance(merged.get(key), dict) and not isinstance(value, dict):
            raise PatchError(f"{here} is not a mapping; write a mapping")
        else:
            result = _merge(merged.get(key), value, here)
            if result is None:
                merged.pop(key, None)
            else:
                merged[key] = result
    return merged


def _merge_list(base: Any, patch: list[Any], key: str, path: str) -> list[Any]:
    merged: list[Any] = list(base) if isinstance(base, list) else []
    # Not searched for each item: a list may have thousands. Of two with one key, the first is meant.
    places: dict[Any, int] = {}
    for index, other in enumerate(merged):
        places.setdefault(other.get(key), index)
    whole = path.endswith(".volumes")
    for position, item in enumerate(patch):
        here = f"{path}[{position}]"
        if not isinstance(item, dict) or key not in item:
            raise PatchError(f"{here} has no {key}; write which {path.rpartition('.')[2]} it changes or adds")
        if not isinstance(item[key], str | int):
            raise PatchError(f"{here}.{key} is neither text nor a number; write one")
        found = places.get(item[key])
        before = merged[found] if found is not None else None
        if whole and before is not None and before.keys() != item.keys() and _DIRECTIVE not in item:
            before = None  # a volume has one source: another one takes its place
        result = _merge(before, item, here)
        if found is not None:
            merged[found] = result
        elif result is not None:
            places[item[key]] = len(merged)
            merged.append(result)
    return [item for item in merged if item is not None]
