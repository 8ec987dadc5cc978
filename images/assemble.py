"""Put the images of images/Dockerfile together without Docker, where tests run on a machine that has none.

The Dockerfile is read, not described again: its instructions run in a chroot over a base from debootstrap,
and what `docker build` would say about user, environment and command comes out as JSON. So a test of these
images is a test of the Dockerfile, but for the base (debootstrap's minbase, not the image of the argument
BASE), the architecture (this machine's) and the builder. Every stage is a directory below the cache, named by
the digest of all that went into it, and made again only when that changes. What an instruction may say is
little; whatever else is refused.

    python images/assemble.py --out DIRECTORY operator canary

writes DIRECTORY/operator.json and DIRECTORY/canary.json, each a name, a config with OCI's keys, and layers,
lowest first: a directory and the prefix where its content lies in the image. A layer that is `linked` need
not be packed: its files are never written again, so they may be hard-linked to where a container finds them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILE = REPOSITORY / "images/Dockerfile"
ARGUMENTS = {"UV_LINK_MODE": "hardlink"}
"""The cache lies in the stage's own file system here: a torch environment takes seconds and no space."""

_DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_UV_CACHE = "/root/.cache/uv"
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


class DockerfileError(ValueError):
    """An instruction that this program does not know, or that says something it cannot do."""


class AssemblyError(RuntimeError):
    """The machine lacks something, or an instruction failed."""


# -- the Dockerfile ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One instruction: `text` is what follows the keyword and its --flags, with lines joined."""

    line: int
    keyword: str
    flags: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Run:
    """A shell command with all that it finds around it."""

    line: int
    command: str
    environment: Mapping[str, str]
    directory: str
    cache: str | None
    """Where a directory lies that outlives the build."""


@dataclass(frozen=True)
class Copy:
    """Sources, of the context or of a stage, and where they go (absolute; ends with / when a directory)."""

    line: int
    stage: str | None
    sources: tuple[str, ...]
    destination: str


@dataclass
class Stage:
    """A stage with what it has from those below it already in place."""

    name: str
    base: str
    """Name of a stage, or of an image."""
    steps: list[Run | Copy] = field(default_factory=list)
    """What changes files, of this stage alone."""
    config: dict[str, Any] = field(default_factory=dict)
    """OCI's keys: User, Env, Entrypoint, Cmd, WorkingDir, Labels, StopSignal."""
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)


def instructions(text: str) -> Iterator[Instruction]:
    """Split a Dockerfile into instructions; comments may stand between the lines of one, as Docker has it."""
    joined, first = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            if re.match(r"#\s*escape\s*=", line):
                raise DockerfileError(f"line {number}: another escape character is not supported")
            continue
        first = first if joined else number
        joined += line.removesuffix("\\")
        if line.endswith("\\"):
            continue
        keyword, _, rest = joined.partition(" ")
        flags = []
        rest = rest.lstrip()
        while rest.startswith("--"):
            flag, _, rest = rest.partition(" ")
            flags.append(flag)
            rest = rest.lstrip()
        yield Instruction(first, keyword, tuple(flags), rest)
        joined = ""
    if joined:
        raise DockerfileError(f"line {first}: the last line ends with a backslash")


def parse(text: str, arguments: Mapping[str, str] | None = None) -> dict[str, Stage]:
    """Read a Dockerfile into its stages by name; `arguments` are what --build-arg gives.

    Raises DockerfileError for whatever is not known here, with the line.
    """
    given = dict(arguments or {})
    first: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for item in instructions(text):
        if item.keyword == "FROM":
            match = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", item.text)
            if match is None or item.flags:
                raise DockerfileError(f"line {item.line}: write FROM image AS name")
            base = _expand(match[1], first, item.line)
            below = stages.get(base)
            stage = Stage(match[2], base)
            if below is not None:
                stage.config = dict(below.config)
                stage.environment = dict(below.environment)
                stage.arguments = dict(below.arguments)
            if stage.name in stages:
                raise DockerfileError(f"line {item.line}: there is a stage {stage.name} already")
            stages[stage.name] = stage
        elif item.keyword == "ARG":
            name, _, default = item.text.partition("=")
            if not re.fullmatch(r"\w+", name) or " " in default or item.flags:
                raise DockerfileError(f"line {item.line}: write ARG NAME=value")
            (first if stage is None else stage.arguments)[name] = given.get(name, default)
        elif stage is None:
            raise DockerfileError(f"line {item.line}: {item.keyword} before the first FROM")
        else:
            _read(stage, stages, item)
    return stages


def _read(stage: Stage, stages: Mapping[str, Stage], item: Instruction) -> None:
    where = f"line {item.line}"
    allowed = {"RUN": "--mount=", "COPY": "--from="}.get(item.keyword)
    if any(allowed is None or not flag.startswith(allowed) for flag in item.flags) or len(item.flags) > 1:
        raise DockerfileError(f"{where}: {item.keyword} {' '.join(item.flags)} is not supported")
    flag = item.flags[0].partition("=")[2] if item.flags else None
    variables = {**stage.arguments, **stage.environment}
    match item.keyword:
        case "RUN":
            if item.text.startswith(("[", "<<")) or "User" in stage.config:
                raise DockerfileError(f"{where}: RUN takes a shell command on one logical line, before USER")
            cache = re.fullmatch(r"type=cache,target=(/\S+)", flag) if flag is not None else None
            if flag is not None and cache is None:
                raise DockerfileError(f"{where}: write --mount=type=cache,target=/path")
            environment = {"PATH": _DEBIAN_PATH, "HOME": "/root", **variables}
            directory = stage.config.get("WorkingDir", "/")
            target = cache[1] if cache is not None else None
            stage.steps.append(Run(item.line, item.text, environment, directory, target))
        case "COPY":
            words = item.text.split()
            if len(words) < 2 or item.text.startswith("[") or re.search(r"[*?\"'$]", item.text):
                raise DockerfileError(f"{where}: COPY takes plain paths, a source at least and a destination")
            if flag is not None and flag not in stages:
                raise DockerfileError(f"{where}: there is no stage {flag} above")
            *sources, last = words
            if len(sources) > 1 and not last.endswith("/"):
                raise DockerfileError(f"{where}: where several sources go, end the destination with /")
            destination = os.path.normpath(os.path.join(stage.config.get("WorkingDir", "/"), last))  # noqa: PTH118
            destination += "/" * (last.endswith("/") and destination != "/")
            stage.steps.append(Copy(item.line, flag, tuple(sources), destination))
        case "ENV":
            stage.environment.update(_pairs(item, variables))
            stage.config["Env"] = [f"{name}={value}" for name, value in stage.environment.items()]
        case "LABEL":
            stage.config["Labels"] = {**stage.config.get("Labels", {}), **_pairs(item, variables)}
        case "USER" | "WORKDIR" | "STOPSIGNAL":
            if not re.fullmatch(r"[\w/:.-]+", item.text):
                raise DockerfileError(f"{where}: {item.keyword} takes one plain word")
            key = {"USER": "User", "WORKDIR": "WorkingDir", "STOPSIGNAL": "StopSignal"}[item.keyword]
            stage.config[key] = item.text
        case "ENTRYPOINT" | "CMD":
            if not re.fullmatch(r'\[("[^"\\$]*"(, )?)*\]', item.text):
                raise DockerfileError(f'{where}: {item.keyword} takes a list, ["program", "argument"]')
            stage.config["Entrypoint" if item.keyword == "ENTRYPOINT" else "Cmd"] = json.loads(item.text)
        case _:
            raise DockerfileError(f"{where}: {item.keyword} is not supported")


def _pairs(item: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(item.text)]
    if not pairs or any(not name or not equals for name, equals, _ in pairs):
        raise DockerfileError(f"line {item.line}: write {item.keyword} name=value")
    return {name: _expand(value, variables, item.line) for name, _, value in pairs}


def _expand(text: str, variables: Mapping[str, str], line: int) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in variables:
            raise DockerfileError(f"line {line}: {match[1]} has no value")
        return variables[match[1]]

    expanded = re.sub(r"\$\{(\w+)\}", value, text)
    if "$" in re.sub(r"\$\{(\w+)\}", "", text):
        raise DockerfileError(f"line {line}: of variables, only ${{NAME}} is supported")
    return expanded


# -- the context ------------------------------------------------------------------------------------------


def ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether .dockerignore's patterns keep a path out of the context: the last one that fits decides."""
    result = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!")
        parts = re.split(r"(\*\*/|\*)", wanted)
        expression = "".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(part) or re.escape(part) for part in parts)
        if re.fullmatch(f"{expression}(?:/.*)?", path):
            result = not pattern.startswith("!")
    return result


def context(root: Path, source: str) -> list[Path]:
    """Files of the context that a source of COPY names, sorted; DockerfileError when there is none."""
    text = (root / ".dockerignore").read_text(encoding="utf-8")
    patterns = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    path = root / source
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [one for one in found if one.is_file() and not ignored(str(one.relative_to(root)), patterns)]
    if not files:
        raise DockerfileError(f"COPY {source}: the context has no such file; see .dockerignore")
    return files


# -- stages as directories --------------------------------------------------------------------------------


class Assembly:
    """Makes directories of stages below `cache`, which nothing else may write to."""

    def __init__(self, stages: Mapping[str, Stage], root: Path, cache: Path) -> None:
        self._stages, self._root, self._cache = stages, root, cache

    def image(self, target: str) -> dict[str, Any]:
        """Make what a target needs and return its document; AssemblyError when a step fails."""
        stage = self._stage(target)
        layers: list[dict[str, Any]] = [{"directory": str(self._directory(stage.base))}]
        for step in stage.steps:
            if isinstance(step, Run):
                raise DockerfileError(
                    f"line {step.line}: RUN in {target}, which is an image: only COPY there"
                )
            for source in step.sources:
                if step.stage is None:
                    directory = self._of_context(source)
                else:
                    directory = self._directory(step.stage) / source.strip("/")
                layer = {"directory": str(directory), "prefix": step.destination}
                layers.append(layer | {"linked": True} if step.stage is not None else layer)
        return {"name": f"localhost/tracerl-{target}:test", "config": stage.config, "layers": layers}

    def prune(self) -> None:
        """Remove directories that no stage of the Dockerfile leads to any more."""
        names = {name for stage in self._stages.values() for name in (stage.name, stage.base)}
        wanted = {self._path(name).name for name in names}
        for path in (self._cache / "stages").iterdir():
            if path.name not in wanted:
                shutil.rmtree(path)

    def _stage(self, name: str) -> Stage:
        if name not in self._stages:
            raise AssemblyError(f"there is no target {name}: write one of {', '.join(self._stages)}")
        return self._stages[name]

    def _path(self, name: str) -> Path:
        return self._cache / "stages" / f"{re.sub(r'[^a-z0-9-]', '-', name)}-{self._digest(name)[:16]}"

    @functools.cache  # noqa: B019 (one object a process)
    def _digest(self, name: str) -> str:
        if name not in self._stages:
            return hashlib.sha256(name.encode()).hexdigest()
        stage = self._stages[name]
        parts: list[Any] = [self._digest(stage.base)]
        for step in stage.steps:
            if isinstance(step, Run):
                parts.append([step.command, dict(step.environment), step.directory, step.cache])
            elif step.stage is not None:
                parts.append([self._digest(step.stage), step.sources, step.destination])
            else:
                parts.append([[self._content(source) for source in step.sources], step.destination])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @functools.cache  # noqa: B019 (one object a process)
    def _content(self, source: str) -> str:
        digest = hashlib.sha256()
        for path in context(self._root, source):
            data = path.read_bytes()
            executable = bool(path.stat().st_mode & 0o100)
            digest.update(f"{path.relative_to(self._root)}\0{executable}\0{len(data)}\0".encode() + data)
        return digest.hexdigest()

    def _directory(self, name: str) -> Path:
        """Return the directory of a stage, or of the image below all, and make it when it is not there."""
        path = self._path(name)
        if path.exists():
            return path
        unfinished = path.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        if name not in self._stages:
            self._debootstrap(name, unfinished)
        else:
            stage = self._stages[name]
            below = self._directory(stage.base)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", "--reflink=auto", below, unfinished], check=True)
            for step in stage.steps:
                if isinstance(step, Run):
                    self._run(name, step, unfinished)
                else:
                    self._copy(step, unfinished)
        unfinished.rename(path)
        return path

    def _debootstrap(self, image: str, path: Path) -> None:
        match = re.match(r"(?:.*/)?debian:([a-z]+)", image)
        if match is None:
            raise AssemblyError(f"{image} is no tag of Debian: only that can be made without a registry")
        if shutil.which("debootstrap") is None:
            raise AssemblyError("debootstrap is needed: install it (Debian: apt-get install debootstrap)")
        path.mkdir(parents=True)
        # What it mounts below the path must never be found there by whoever removes the path.
        words = ["unshare", "--mount", "debootstrap", "--variant=minbase", match[1], str(path)]
        self._log("base", f"debootstrap {match[1]}", words)
        for pattern in ("dev/*", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/log/*.log"):
            for one in path.glob(pattern):
                shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        (path / "etc/hostname").unlink(missing_ok=True)
        (path / "etc/resolv.conf").write_text("")  # this machine's; a container gets its own

    def _copy(self, step: Copy, root: Path) -> None:
        if step.stage is not None:
            raise DockerfileError(f"line {step.line}: COPY --from only in an image")
        destination = root / step.destination.strip("/")
        for source in step.sources:
            origin = self._root / source
            for file in context(self._root, source):
                if origin.is_dir():
                    target = destination / file.relative_to(origin)
                else:
                    target = destination / file.name if step.destination.endswith("/") else destination
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
                target.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)

    def _of_context(self, source: str) -> Path:
        """Return a directory with a source's files, as the context has them."""
        path = self._cache / "context" / self._content(source)[:16]
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            self._copy(Copy(0, None, (source,), "/"), unfinished)
            unfinished.rename(path)
        return path

    def _run(self, stage: str, step: Run, root: Path) -> None:
        environment = {name: os.environ[name] for name in _PROXIES if name in os.environ}
        certificates = os.environ.get("SSL_CERT_FILE", _CERTIFICATES)
        if Path(certificates).exists():
            environment |= {"SSL_CERT_FILE": "/run/certificates.pem", "PIP_CERT": "/run/certificates.pem"}
        environment |= step.environment
        (root / step.directory.strip("/")).mkdir(parents=True, exist_ok=True)
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", _CHROOT, "sh"]
        words += [str(root), certificates, step.directory, step.command]
        words += [f"{name}={value}" for name, value in environment.items()]
        with self._mounted(step.cache, root):
            self._log(stage, f"RUN {step.command}", words)

    @contextlib.contextmanager
    def _mounted(self, target: str | None, root: Path) -> Iterator[None]:
        """Keep a cache at its target while a command runs.

        It is moved there and back: of a mount, another file system to link(2), nothing is linked.
        """
        if target is None:
            yield
            return
        kept = self._cache / "mounts" / target.strip("/").replace("/", "-")
        inside = root / target.strip("/")
        if inside.exists():
            raise DockerfileError(f"{target} is to be a cache, but the stage holds files there already")
        if not kept.exists():
            self._seed(kept, of_uv=target == _UV_CACHE)
        inside.parent.mkdir(parents=True, exist_ok=True)
        kept.rename(inside)
        try:
            yield
        finally:
            inside.rename(kept)

    def _seed(self, cache: Path, *, of_uv: bool) -> None:
        """Start a cache; that of uv with hard links to what the machine's own holds, if that can be."""
        unfinished = cache.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        own = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache/uv")
        if of_uv and own.exists() and own.stat().st_dev == unfinished.stat().st_dev:
            for kind in ("archive", "wheels", "sdists", "simple"):
                for one in own.glob(f"{kind}-v*"):
                    subprocess.run(["cp", "-al", one, unfinished], check=True)
        unfinished.rename(cache)

    def _log(self, stage: str, what: str, words: Sequence[str]) -> None:
        print(f"{stage}: {' '.join(what.split())}", file=sys.stderr, flush=True)
        log = self._cache / "logs" / f"{stage}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
        if done.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise AssemblyError(f"{what} failed ({done.returncode}); the end of {log}:\n{tail}")


_CHROOT = """
root=$1 certificates=$2 directory=$3 command=$4
shift 4
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
[ ! -e /etc/resolv.conf ] || mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
if [ -e "$certificates" ]; then
    touch "$root/run/certificates.pem"
    mount --bind "$certificates" "$root/run/certificates.pem"
fi
exec chroot "$root" env -i -C "$directory" "$@" /bin/sh -c "$command"
"""
"""Names, certificates and proxies are the machine's; nothing of them stays in the stage."""


def main() -> int:
    """Write the documents of the targets that the command line names."""
    parser = argparse.ArgumentParser(description="Put images together without Docker.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the documents")
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="operator, rollout, trainer or canary")
    options = parser.parse_args()
    cluster = os.environ.get("TRACERL_CLUSTER_CACHE") or str(REPOSITORY / ".cache/cluster")
    cache = Path(cluster).absolute() / "images"
    os.umask(0o022)
    try:
        if os.geteuid() != 0:
            raise AssemblyError("root is needed, for chroot and for files that belong to root")
        for path in (cache / "stages", options.out):
            path.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assembly = Assembly(parse(DOCKERFILE.read_text(), ARGUMENTS), REPOSITORY, cache)
            for target in options.targets:
                document = assembly.image(target)
                (options.out / f"{target}.json").write_text(json.dumps(document, indent=2) + "\n")
                print(f"{document['name']}: {len(document['layers'])} layers")
            assembly.prune()
    except (AssemblyError, DockerfileError) as error:
        print(f"assemble: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
