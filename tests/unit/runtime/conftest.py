import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tracerl.runtime.processes import ProcessSpec


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], ProcessSpec]:
    """Make a process out of Python code that finds the test's directory in `here`, also its mark in /proc."""

    def make(name: str, code: str) -> ProcessSpec:
        head = "import os, signal, subprocess, sys, time, pathlib\nhere = pathlib.Path(sys.argv[1])\n"
        arguments = [sys.executable, "-c", head + code, str(tmp_path)]
        return ProcessSpec(name, name.partition("-")[0], arguments, tmp_path / "logs" / f"{name}.log", {})

    return make
