"""Which Python runs which process of a local run, and whether it has what the job's engines need.

Real engines bring packages in versions that do not go together, so each role may have an environment of its
own: its interpreter is named in TRACERL_ROLLOUT_PYTHON or TRACERL_TRAINER_PYTHON, and is this one otherwise.
`make engines` builds such environments.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracerl.api.errors import InputError, how_to_install
from tracerl.api.job import RolloutEngine, Spec, TrainerEngine

ROLES = ("rollout", "trainer")
"""Those that may have an interpreter of their own."""
_PROBE_SECONDS = 60.0
_PROBE = """
import importlib.util, sys
print("Python")
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        print(name)
"""


@dataclass(frozen=True, slots=True)
class Need:
    """A module that a field of the job needs in the interpreter of a role, and how to get it."""

    role: str
    field: str
    value: str
    module: str
    package: str
    remedy: str


def variable(role: str) -> str:
    """Name of the environment variable that holds the interpreter of a role."""
    return f"TRACERL_{role.upper()}_PYTHON"


def interpreter(role: str, environ: Mapping[str, str] = os.environ) -> str:
    """Path of the interpreter of a role; InputError when its variable names none."""
    named = environ.get(variable(role)) if role in ROLES else None
    if not named:
        return sys.executable
    found = shutil.which(Path(named).expanduser())
    if found is None:
        raise InputError(
            f"{variable(role)} is {named[:200]!r}, which is no program; name a Python, or unset it"
        )
    # Not resolved: the link in a virtual environment is what makes it one.
    return os.path.abspath(found)  # noqa: PTH100


def needs(spec: Spec) -> list[Need]:
    """Modules that the processes of a job import beside what the extra jobs installs."""
    found = []
    for role, engine, module, package, environment in (
        ("rollout", RolloutEngine.SGLANG, "sglang", "SGLang", "sglang"),
        ("trainer", TrainerEngine.MEGATRON, "megatron", "Megatron-Core", "megatron"),
    ):
        if getattr(spec, role).engine is engine:
            remedy = (
                "build its environment with make engines, and name that: "
                f"{variable(role)}=.cache/engines/{environment}/bin/python"
            )
            found.append(Need(role, f"spec.{role}.engine", engine, module, package, remedy))
    task = spec.task.name or ""
    if task.startswith("reasoning_gym/"):
        remedy = f"{how_to_install('tasks')}, or write builtin/chain_sum"
        found.append(Need("trainer", "spec.task.name", task, "reasoning_gym", "reasoning-gym", remedy))
    return found


def require_packages(spec: Spec, *roles: str) -> None:
    """Raise InputError when the interpreter of one of the roles, by default all, lacks what the job needs."""
    for role in roles or ROLES:
        python = interpreter(role)
        wanted = [need for need in needs(spec) if need.role == role]
        absent = _absent(python, ["tracerl", *(need.module for need in wanted)])
        if "tracerl" in absent:
            raise InputError(
                f"{variable(role)} is {python}, which has no tracerl; install it there with its extra jobs, "
                "or build the environment with make engines"
            )
        for need in wanted:
            if need.module in absent:
                where = "" if python == sys.executable else f" in {python}"
                raise InputError(
                    f"{need.field} {need.value} needs {need.package}, which is not installed{where}; "
                    f"{need.remedy}"
                )


def require_here(spec: Spec, role: str) -> None:
    """Raise InputError when the process of a role, which this is, lacks what the job needs; for pods."""
    for need in needs(spec):
        if need.role == role and importlib.util.find_spec(need.module) is None:
            raise InputError(
                f"{need.field} {need.value} needs {need.package}, which is not installed in {sys.prefix}; "
                f"on a cluster name an image that has it in spec.{role}.image, on one machine {need.remedy}"
            )


def _absent(python: str, modules: Sequence[str]) -> list[str]:
    """Name those of the modules that an interpreter does not find; InputError when it is not a Python."""
    if python == sys.executable:
        return [name for name in modules if importlib.util.find_spec(name) is None]
    try:
        done = subprocess.run(  # noqa: S603
            [python, "-P", "-c", _PROBE, *modules],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _no_python(python, type(error).__name__) from None
    first, *absent = done.stdout.split() or [""]
    if first != "Python":
        raise _no_python(python, "it did not run a line of Python")
    return absent


def _no_python(python: str, why: str) -> InputError:
    return InputError(
        f"{python} cannot run as a Python of 3.11 or newer ({why}); "
        "build the environment again with make engines"
    )
