"""The operator's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tracerl_operator.types import Installation

_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    installation: Installation
    namespaces: tuple[str, ...]
    peering: str | None
    """Name of the Lease; None when no other operator runs."""
    host: str
    port: int
    log_format: str
    log_level: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help shows all flags\n")


def parse(arguments: Sequence[str] | None) -> Options:
    """Read the command line; ends the process with code 2 and one sentence when it is wrong."""
    parser = _Parser(prog="tracerl_operator", description="Runs TraceRLJobs on a Kubernetes cluster.")
    add = parser.add_argument
    add("--rollout-image", required=True, metavar="IMAGE", help="image of rollouts that name none")
    add("--trainer-image", required=True, metavar="IMAGE", help="image of trainers that name none")
    add(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="look at this namespace only; repeatable",
    )
    add(
        "--node-ring", action="store_true", help="allow spec.placement.colocation Node, which mounts /dev/shm"
    )
    add("--network-policy", action="store_true", help="give each job a NetworkPolicy")
    add("--pod-monitor", action="store_true", help="give each job a PodMonitor, where the cluster has them")
    add(
        *("--pod-monitor-label",),
        action="append",
        default=[],
        type=_label,
        metavar="KEY=VALUE",
        help="label of PodMonitors, by which a Prometheus selects them; repeatable",
    )
    add(
        *("--peering",),
        default="tracerl-operator",
        metavar="NAME",
        help="name of the Lease whose holder works while others stand by; none: no other operator runs",
    )
    add(
        "--listen",
        default="0.0.0.0:8080",
        type=_address,
        metavar="HOST:PORT",
        help="/healthz, /readyz, /metrics",
    )
    add("--log-format", choices=("json", "text"), default="json")
    add("--log-level", choices=_LEVELS, default="info", type=str.lower)
    found = parser.parse_args(arguments)
    host, port = found.listen if isinstance(found.listen, tuple) else _address(found.listen)
    return Options(
        installation=Installation(
            rollout_image=found.rollout_image,
            trainer_image=found.trainer_image,
            node_ring=found.node_ring,
            network_policy=found.network_policy,
            pod_monitor=found.pod_monitor,
            pod_monitor_labels=dict(found.pod_monitor_label),
        ),
        namespaces=tuple(dict.fromkeys(found.namespace)),
        peering=None if found.peering == "none" else found.peering,
        host=host,
        port=port,
        log_format=found.log_format,
        log_level=found.log_level,
    )


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and port.isdecimal() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
