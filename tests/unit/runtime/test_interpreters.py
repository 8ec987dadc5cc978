"""Which Python runs which role, and what is said when it lacks an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_rundir import job

from tracerl.api.errors import InputError
from tracerl.runtime import interpreters, local, rundir
from tracerl.runtime.interpreters import interpreter, require_here, require_packages
from tracerl.runtime.rollout_main import sglang_environment


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A real virtual environment with nothing in it."""
    place = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    return place / "bin/python"


@pytest.fixture
def with_tracerl(bare: Path) -> Path:
    """The same with tracerl, and with a module that is called like SGLang's but for nothing else."""
    [packages] = bare.parents[1].glob("lib/python*/site-packages")
    (packages / "tracerl.pth").write_text(str(Path(interpreters.__file__).parents[2]))
    (packages / "sglang.py").touch()
    return bare


def test_each_role_has_an_interpreter_of_its_own(
    monkeypatch: pytest.MonkeyPatch, bare: Path, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRACERL_TRAINER_PYTHON", raising=False)
    monkeypatch.setenv("TRACERL_ROLLOUT_PYTHON", str(bare))
    resolved = rundir.start_run(job(), tmp_path)
    programs = {process.name: process.arguments[0] for process in local.process_specs(resolved)}
    # Not what the link of the environment leads to, which would be the system's Python.
    assert programs == {"store-0": sys.executable, "rollout-0": str(bare), "trainer-0": sys.executable}


def test_a_relative_path_is_of_this_directory(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    monkeypatch.chdir(bare.parents[2])
    assert interpreter("rollout", {"TRACERL_ROLLOUT_PYTHON": "bare/bin/python"}) == str(bare)
    with pytest.raises(InputError, match=r"TRACERL_TRAINER_PYTHON is 'bare/no', which is no program; name"):
        interpreter("trainer", {"TRACERL_TRAINER_PYTHON": "bare/no"})


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            {"rollout": {"engine": "SGLang"}},
            "spec.rollout.engine SGLang needs SGLang, which is not installed; ",
        ),
        ({"trainer": {"engine": "Megatron"}}, "spec.trainer.engine Megatron needs Megatron-Core, which is"),
    ],
)
def test_an_engine_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, object], sentence: str
) -> None:
    """No engine is in the environment of these tests."""
    for role in interpreters.ROLES:
        monkeypatch.delenv(f"TRACERL_{role.upper()}_PYTHON", raising=False)
    with pytest.raises(InputError) as caught:
        require_packages(job(**spec).spec)
    assert str(caught.value).startswith(sentence)
    [role] = spec
    name = {"rollout": "sglang", "trainer": "megatron"}[role]
    assert str(caught.value).endswith(
        f"with make engines, and name that: TRACERL_{role.upper()}_PYTHON=.cache/engines/{name}/bin/python"
    )
    with pytest.raises(
        InputError, match=rf"not installed in .*; on a cluster name an image .* spec.{role}.image"
    ):
        require_here(job(**spec).spec, role)
    require_here(job(**spec).spec, "store")


def test_the_other_interpreter_is_asked(monkeypatch: pytest.MonkeyPatch, with_tracerl: Path) -> None:
    wanted = job(rollout={"engine": "SGLang"}).spec
    monkeypatch.setenv("TRACERL_ROLLOUT_PYTHON", str(with_tracerl))
    require_packages(wanted)
    monkeypatch.setenv("TRACERL_TRAINER_PYTHON", str(with_tracerl))
    with pytest.raises(InputError, match=rf"needs Megatron-Core, which is not installed in {with_tracerl}; "):
        require_packages(job(trainer={"engine": "Megatron"}).spec)


def test_the_package_of_a_task_is_looked_for_where_the_trainer_runs(
    monkeypatch: pytest.MonkeyPatch, with_tracerl: Path
) -> None:
    wanted = job(task={"name": "reasoning_gym/chain_sum"}).spec
    monkeypatch.setenv("TRACERL_TRAINER_PYTHON", str(with_tracerl))
    with pytest.raises(
        InputError, match=r"needs reasoning-gym, which is not installed in .*; run make install in"
    ):
        require_packages(wanted)


def test_an_interpreter_without_tracerl(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("TRACERL_ROLLOUT_PYTHON", str(bare))
    with pytest.raises(InputError, match="which has no tracerl; install it there"):
        require_packages(job().spec)


@pytest.mark.parametrize(
    ("program", "why"), [("false", "CalledProcessError"), ("true", "it did not run a line of Python")]
)
def test_a_program_that_is_no_python(monkeypatch: pytest.MonkeyPatch, program: str, why: str) -> None:
    monkeypatch.setenv("TRACERL_ROLLOUT_PYTHON", f"/bin/{program}")
    with pytest.raises(InputError, match=rf"/bin/{program} cannot run as a Python .* \({why}\)"):
        require_packages(job().spec)


def test_what_sglang_finds_in_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    there = {"SGLANG_PLUGINS": "tracerl", "TRACERL_JOB": f"{tmp_path}/job.yaml"}
    assert sglang_environment("job.yaml", gpus=4) == there
    assert sglang_environment("job.yaml", gpus=0) == there | {"SGLANG_USE_CPU_ENGINE": "1"}
    assert os.environ.get("SGLANG_PLUGINS") is None
