"""Which interface of a pod gloo is told to use; the tables are those of real machines."""

import os

import pytest

from tracerl.runtime.interface import INTERFACE_VARIABLE, choose_interface

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
BRIDGE = "trl0\t0000580A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
DEFAULT = "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
SECOND = "net1\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
CALICO = "eth0\t00000000\t0101FEA9\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
NONE = "0" * 32
DEFAULT6 = f"{NONE} 00 {NONE} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eth6\n"
UNREACHABLE6 = f"{NONE} 00 {NONE} 00 {NONE} ffffffff 00000001 00000000 00200200       lo\n"


@pytest.mark.parametrize(
    ("route", "route6", "names", "found"),
    [
        (HEAD + BRIDGE + DEFAULT, UNREACHABLE6, ["eth0", "lo", "trl0"], "eth0"),
        (HEAD + SECOND + CALICO, None, ["eth0", "lo", "net1"], "eth0"),
        (HEAD, DEFAULT6 + UNREACHABLE6, ["eth6", "lo", "other"], "eth6"),
        (HEAD + BRIDGE, UNREACHABLE6, ["lo", "trl0"], "trl0"),
        (HEAD, None, ["lo", "net1", "net2"], None),
        (HEAD, None, ["lo"], None),
    ],
)
def test_the_interface_of_the_default_route_else_the_only_one(
    monkeypatch, tmp_path, *, route, route6, names, found
):
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/route").write_text(route)
    if route6 is not None:
        (tmp_path / "net/ipv6_route").write_text(route6)
    choose_interface(tmp_path, names)
    assert os.environ.pop(INTERFACE_VARIABLE, None) == found


def test_what_is_set_stays(monkeypatch):
    monkeypatch.setenv(INTERFACE_VARIABLE, "ib0")
    choose_interface()
    assert os.environ[INTERFACE_VARIABLE] == "ib0"
