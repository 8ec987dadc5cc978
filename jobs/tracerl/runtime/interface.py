"""Which network interface of a pod the collective operations of torch use.

Gloo listens where the name of the machine leads, which in a pod may be nowhere, or with the host's network
the loopback: then the others wait for a connection that never comes.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_UP, _GATEWAY = 0x1, 0x2


def choose_interface(proc: Path = Path("/proc"), names: Iterable[str] | None = None) -> None:
    """Set INTERFACE_VARIABLE, unless it is set, to the interface of the default route, else the only one.

    Left unset where there are several and no default route. `names` are all interfaces, None those there are.
    """
    routed = [
        *_default_routes(_lines(proc / "net/route")),
        *_default_routes6(_lines(proc / "net/ipv6_route")),
    ]
    if names is None:
        names = [name for _, name in socket.if_nameindex()]
    others = [name for name in names if name != "lo"]
    if routed or len(others) == 1:
        os.environ.setdefault(INTERFACE_VARIABLE, (routed or others)[0])


def _lines(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except FileNotFoundError:  # a kernel without that protocol
        return []


def _default_routes(lines: Iterable[list[str]]) -> list[str]:
    """Interfaces of IPv4 default routes, the one with the lowest metric first."""
    found = [
        (int(metric), name)
        for name, to, _, flags, _, _, metric, mask, *_ in list(lines)[1:]
        if int(to, 16) == 0 and int(mask, 16) == 0 and int(flags, 16) & _UP
    ]
    return [name for _, name in sorted(found)]


def _default_routes6(lines: Iterable[list[str]]) -> list[str]:
    found = [
        (int(metric, 16), name)
        for to, length, _, _, _, metric, _, _, flags, name in lines
        if int(to, 16) == 0 and int(length, 16) == 0 and int(flags, 16) & _GATEWAY and name != "lo"
    ]
    return [name for _, name in sorted(found)]
