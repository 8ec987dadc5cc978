"""Definitions of other projects' resources, out of their own Go modules where these can be had."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

_TOOLS = Path(__file__).parent / "tools"
_JOBSET = ("jobset", "sigs.k8s.io/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml")
_PROMETHEUS = ("monitoring", "github.com/prometheus-operator/prometheus-operator")
_FILES = {
    "JobSet": _JOBSET,
    "PodMonitor": (*_PROMETHEUS, "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml"),
    "ServiceMonitor": (
        *_PROMETHEUS,
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
    "PrometheusRule": (
        *_PROMETHEUS,
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}
_CHANNEL = {
    "type": "object",
    "required": ["resourceClaimTemplate"],
    "properties": {
        "allocationMode": {"type": "string", "enum": ["All", "Single"], "default": "Single"},
        "resourceClaimTemplate": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
_COMPUTE_DOMAIN = {
    "type": "object",
    "required": ["channel", "numNodes"],
    "properties": {"channel": _CHANNEL, "numNodes": {"type": "integer"}},
    "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "the spec is immutable"}],
}


def compute_domains() -> dict[str, Any]:
    """Define ComputeDomains as their API says them (resource.nvidia.com/v1beta1), for no module has them.

    Fields, what is required, the default, and that a spec cannot change are those of NVIDIA's DRA driver.
    """
    schema = {"type": "object", "properties": {"spec": _COMPUTE_DOMAIN}}
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    names = {"kind": "ComputeDomain", "listKind": "ComputeDomainList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "computedomains.resource.nvidia.com"},
        "spec": {
            "group": "resource.nvidia.com",
            "names": {**names, "plural": "computedomains", "singular": "computedomain"},
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def definition(kind: str) -> dict[str, Any]:
    """Give the CustomResourceDefinition of a kind; skips the test where there is no Go to get it with."""
    if shutil.which("go") is None:
        pytest.skip(f"Go is not installed, and the definition of {kind} comes from a Go module")
    tool, module, path = _FILES[kind]
    command = ["go", "mod", "download", "-json", module]
    found = subprocess.run(command, cwd=_TOOLS / tool, check=True, capture_output=True, text=True)
    text = Path(json.loads(found.stdout)["Dir"], path).read_text()
    document: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return document
