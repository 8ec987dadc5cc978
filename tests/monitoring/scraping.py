"""What the Prometheus operator makes of a PodMonitor, and what Prometheus' discovery says of pods.

After prometheus-operator's pkg/prometheus/promcfg.go and Prometheus' discovery/kubernetes/pod.go: a target a
port of a container, init containers (native sidecars) included, with its labels as `__meta_kubernetes_*`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_POD = "__meta_kubernetes_pod"
_NOWHERE = "127.0.0.1:1"


def _clean(label: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)


def targets(
    template: Mapping[str, Any], *, namespace: str, name: str, addresses: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What discovery finds of a pod; `addresses` are those of its ports by name."""
    labels = template["metadata"]["labels"]
    shared = {"__meta_kubernetes_namespace": namespace, f"{_POD}_name": name, f"{_POD}_phase": "Running"}
    shared |= {f"{_POD}_label_{_clean(key)}": value for key, value in labels.items()}
    shared |= {f"{_POD}_labelpresent_{_clean(key)}": "true" for key in labels}
    spec = template["spec"]
    return [
        {
            "targets": [addresses.get(port["name"], _NOWHERE)],
            "labels": {
                **shared,
                f"{_POD}_container_name": container["name"],
                f"{_POD}_container_port_name": port["name"],
                f"{_POD}_container_port_number": str(port["containerPort"]),
            },
        }
        for container in (*spec["containers"], *spec.get("initContainers", ()))
        for port in container.get("ports", ())
    ]


def scrape_configs(monitor: Mapping[str, Any], *, credentials: Path, found: Path) -> list[dict[str, Any]]:
    """A scrape configuration an endpoint; `credentials` has its token, `found` what discovery says."""
    metadata, spec = monitor["metadata"], monitor["spec"]
    configs = []
    for number, endpoint in enumerate(spec["podMetricsEndpoints"]):
        relabelings: list[dict[str, Any]] = [
            {"source_labels": [f"{_POD}_phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
            *(
                {
                    "source_labels": [f"{_POD}_label_{_clean(key)}", f"{_POD}_labelpresent_{_clean(key)}"],
                    "regex": f"({re.escape(value)});true",
                    "action": "keep",
                }
                for key, value in sorted(spec["selector"]["matchLabels"].items())
            ),
            {
                "source_labels": [f"{_POD}_container_port_name"],
                "regex": endpoint["port"],
                "action": "keep",
            },
            {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{_POD}_container_name"], "target_label": "container"},
            {"source_labels": [f"{_POD}_name"], "target_label": "pod"},
            {"target_label": "job", "replacement": f"{metadata['namespace']}/{metadata['name']}"},
            {
                "source_labels": [f"{_POD}_label_{_clean(spec['jobLabel'])}"],
                "target_label": "job",
                "regex": "(.+)",
                "replacement": "${1}",
            },
            {"target_label": "endpoint", "replacement": endpoint["port"]},
            *map(_snake, endpoint.get("relabelings", ())),
        ]
        configs.append(
            {
                "job_name": f"podMonitor/{metadata['namespace']}/{metadata['name']}/{number}",
                "metrics_path": endpoint["path"],
                "authorization": {
                    "type": endpoint["authorization"]["type"],
                    "credentials_file": str(credentials),
                },
                "file_sd_configs": [{"files": [str(found)], "refresh_interval": "1s"}],
                "relabel_configs": relabelings,
                "metric_relabel_configs": [*map(_snake, endpoint.get("metricRelabelings", ()))],
            }
        )
    return configs


def _snake(relabeling: Mapping[str, Any]) -> dict[str, Any]:
    return {re.sub(r"([A-Z])", r"_\1", key).lower(): value for key, value in relabeling.items()}
