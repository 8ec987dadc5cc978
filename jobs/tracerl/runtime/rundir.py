"""The run directory of a local run: claimed by one `tracerl run` at a time, and tidy however that ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import resource
import secrets
import shutil
import signal
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError
from tracerl.api.job import Colocation, Mutability, Retention, Spec, Spill, TraceRLJob
from tracerl.api.resolved import Endpoint, Endpoints, ResolvedJob, RunLayout, write_atomically
from tracerl.observe.run import Ending
from tracerl.runtime.processes import PARENT_VARIABLE, process_ids
from tracerl.transport.ring.file import reap
from tracerl.transport.store.spill import remove_leftovers

# A run that was killed holds its lock until its children noticed, which takes them a poll of their parent,
# and have stopped. After that they are stuck, and killed; this is also how long that may take.
_LOCK_SECONDS = 5.0
_OBJECTS_SECONDS = 10.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (shared memory is where it is)
OPEN_FILES = 256
"""What each process of a run may have to hold open at once, with its connections."""
_MANY_FILES = 65_536
_PATH_BYTES = 900
"""Of a run directory: processes send each other paths of at most 1,024 characters below it."""


def read_ending(layout: RunLayout) -> Ending | None:
    """How the last run in this directory ended, or None when it was killed or has not ended."""
    try:
        return Ending.model_validate_json(layout.result.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def write_ending(layout: RunLayout, ending: Ending) -> None:
    """Keep how the run ended; OSError when that cannot be written."""
    write_atomically(layout.result, ending.model_dump_json(indent=2) + "\n")


def cache_directory() -> Path:
    """Where things that outlive runs are kept: ``$TRACERL_CACHE``, else ``~/.cache/tracerl``."""
    named = os.environ.get("TRACERL_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tracerl"


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[int]:
    """Make the directory if need be and hold it; yields the descriptor of its lock.

    InputError when it cannot be made or written, or when another run holds it.
    """
    layout = RunLayout(directory)
    with _usable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(lock, directory)
        with disk_errors(directory):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        try:
            yield lock
        finally:
            os.ftruncate(lock, 0)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{directory} cannot be used as run directory ({_words(error)}); give another with --out"
        ) from error


def _lock(lock: int, directory: Path) -> None:
    layout = RunLayout(directory)
    if _locked(lock, directory, _LOCK_SECONDS):
        return
    for pid in process_ids():
        if _is_left_over(pid, layout.job):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # A process of a run leads its group.
                os.killpg(pid, signal.SIGKILL)
    if _locked(lock, directory, _LOCK_SECONDS):
        return
    pids = [str(pid) for pid in process_ids() if _holds(pid, layout.lock)]
    named = f" ({', '.join(pids)})" if pids else ""
    raise InputError(
        f"an earlier tracerl run left processes behind{named} that still work in {directory}; "
        "end them or give another directory with --out"
    )


def _locked(lock: int, directory: Path, seconds: float) -> bool:
    """Whether the lock was taken within that time; InputError when the run that holds it lives."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            if holder.isdecimal() and Path("/proc", holder).exists():
                raise InputError(
                    f"another tracerl run (process {holder}) works in {directory}; "
                    "wait for it, stop it, or give another directory with --out"
                ) from None
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _is_left_over(pid: int, job: Path) -> bool:
    """Whether a process was started for the run of this resolved job by a parent that is dead."""
    process = Path("/proc", str(pid))
    try:
        arguments = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")]
        if not any(word.startswith("tracerl.runtime.") and word.endswith("_main") for word in arguments):
            return False
        if not any(os.path.realpath(word) == os.path.realpath(job) for word in arguments):
            return False
        environment = (process / "environ").read_bytes().split(b"\0")
        parents = [entry for entry in environment if entry.startswith(f"{PARENT_VARIABLE}=".encode())]
        return bool(parents) and parents[0] != f"{PARENT_VARIABLE}={_parent(process)}".encode()
    except OSError:  # it ended, or belongs to another user
        return False


def _parent(process: Path) -> str:
    # The name of the program, in parentheses, may hold anything.
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]


def _holds(pid: int, lock: Path) -> bool:
    try:
        for link in Path("/proc", str(pid), "fd").iterdir():
            if link.samefile(lock) and "lock:" in (link.parents[1] / "fdinfo" / link.name).read_text():
                return True
    except OSError:  # it ended, or belongs to another user
        pass
    return False


@contextlib.contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Turn a failure to write in the run directory into a JobError with the sentence for the user."""
    try:
        yield
    except OSError as error:
        raise JobError(
            Reason.CONFIGURATION,
            f"{error.filename or directory} cannot be written ({_words(error)}); "
            "make room or give another directory with --out",
        ) from error


def allow_open_files() -> None:
    """Raise this process's limit of open files, which its children inherit, as far as that is allowed.

    InputError when even that is too little for a run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if most < OPEN_FILES:
        raise InputError(
            f"a process may have {most} files open (ulimit -Hn), and those of a run need {OPEN_FILES}; raise "
            f"the limit of the shell, the service or the container that starts tracerl run"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _words(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "no space left"
    return (error.strerror or str(error)).lower()


def refuse(directory: Path, *, resume: bool) -> None:
    """Raise InputError when a run cannot start or be resumed in this directory, without touching it.

    A run may start where an earlier one left neither a step nor a checkpoint.
    """
    with _usable(directory):
        _refuse(directory, resume=resume)


def _refuse(directory: Path, *, resume: bool) -> None:
    layout = RunLayout(directory)
    shown = os.fsencode(directory).decode("utf-8", "replace")
    if shown != str(directory):
        raise InputError(f"{shown} is not UTF-8; give another directory with --out")
    if len(shown.encode()) > _PATH_BYTES:
        raise InputError(
            f"the run directory {shown[:60]}… has a path of {len(shown.encode()):,} bytes, more than "
            f"{_PATH_BYTES}; give another directory with --out"
        )
    if "::" in shown:
        raise InputError(f"{shown} holds ::, which joins URLs of fsspec; give another directory with --out")
    if resume:
        if not layout.job.exists():
            raise InputError(f"{directory} has no run to resume; start one without --resume")
    elif has_begun(directory):
        raise InputError(
            f"{directory} already has a run; continue it with --resume or give another directory with --out"
        )
    elif directory.is_dir() and not layout.job.exists():
        others = sorted(entry.name for entry in directory.iterdir() if entry != layout.lock)
        if others:
            raise InputError(
                f"{directory} holds other files, for example {others[0]}; give a new directory with --out"
            )


def has_begun(directory: Path) -> bool:
    """Whether a run is here that has something to go on from: a step or a checkpoint.

    InputError when that cannot be seen.
    """
    layout = RunLayout(directory)
    with _usable(directory):
        if not layout.job.exists():
            return False
        stepped = layout.metrics.exists() and layout.metrics.stat().st_size > 0
        return stepped or any(layout.checkpoints.glob("step-*"))


def start_run(job: TraceRLJob, directory: Path) -> ResolvedJob:
    """Resolve a job into a claimed directory that `refuse` let pass.

    What an earlier run logged there before its first step is removed, but for the logs of its processes.
    """
    layout = RunLayout(directory)
    for path in (layout.metrics, layout.events, layout.result, layout.summary, layout.report):
        path.unlink(missing_ok=True)
    return _resolve(job, directory, job.metadata.uid or str(uuid.uuid4()))


def _resolve(job: TraceRLJob, directory: Path, job_uid: str) -> ResolvedJob:
    layout, only_object = RunLayout(directory), job.spec.transport.only_object
    resolved = ResolvedJob(
        job=job,
        job_uid=job_uid,
        run_dir=directory,
        cache_dir=cache_directory(),
        token_file=layout.token,
        ring_dir=None if only_object else _ring_directory(directory, job_uid),
        endpoints=_endpoints(job.spec, layout),
    )
    resolved.write(layout.job)
    return resolved


def _ring_directory(directory: Path, job_uid: str) -> Path:
    """Name a directory in shared memory after a run: short, since sockets lie in it, and of one run alone.

    Two runs of one manifest that sets a UID differ in their run directories.
    """
    digest = hashlib.sha256(f"{job_uid}\0{directory}".encode("utf-8", "surrogateescape")).hexdigest()
    return SHARED_MEMORY / f"{_ring_prefix()}{digest[:12]}"


def _ring_prefix() -> str:
    return f"tracerl-{os.getuid()}-"


def _endpoints(spec: Spec, layout: RunLayout) -> Endpoints:
    """Place the processes on the nodes that this machine stands in for, as pods would be on a cluster's."""
    rollouts, trainers, ranks = spec.rollout.nodes, spec.trainer.nodes, spec.trainer.parallelism.ranks
    apart = rollouts if spec.placement.colocation is Colocation.NONE else 0

    def endpoints(role: str, nodes: Iterable[int]) -> list[Endpoint]:
        return [Endpoint(name=f"{role}-{i}", node=f"node-{node}") for i, node in enumerate(nodes)]

    return Endpoints(
        directory=layout.endpoints,
        rollout=endpoints("rollout", range(rollouts)),
        store=endpoints("store", range(0 if spec.transport.only_object else rollouts)),
        trainer=endpoints("trainer", (apart + rank * trainers // ranks for rank in range(ranks))),
    )


def resume_run(job: TraceRLJob, directory: Path) -> ResolvedJob:
    """Take up the run in a directory, also when that was moved or the job's mutable fields were changed.

    InputError when it is of a job that differs in a field that must not change.
    """
    layout = RunLayout(directory)
    before = ResolvedJob.read(layout.job)
    changed = [
        path
        for path in _differences(Spec, _document(before.job.spec), _document(job.spec), "spec")
        if not path.startswith("spec.output.")
    ]
    if before.job.metadata.name != job.metadata.name:
        changed.insert(0, "metadata.name")
    if changed:
        anew = "start a new run with --out" if has_begun(directory) else "start it anew without --resume"
        raise InputError(
            f"{changed[0]} is not what the run in {directory} was started with; undo that or {anew}"
        )
    return _resolve(job, directory, before.job_uid)


def _document(spec: Spec) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True)


def _differences(model: Any, before: Any, after: Any, path: str) -> list[str]:
    """Paths of the fields that differ and are immutable while a job is suspended, too."""
    if not (isinstance(before, dict) and isinstance(after, dict) and hasattr(model, "model_fields")):
        return [] if before == after else [path]
    found = []
    for name, info in model.model_fields.items():
        alias = info.alias or name
        extra = info.json_schema_extra or {}
        if extra.get("x-tracerl-mutability", Mutability.IMMUTABLE) == Mutability.IMMUTABLE:
            found += _differences(info.annotation, before.get(alias), after.get(alias), f"{path}.{alias}")
    return found


def write_token(layout: RunLayout) -> None:
    """Make a new bearer token that only this user can read."""
    layout.token.unlink(missing_ok=True)
    descriptor = os.open(layout.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32) + "\n")


def remove_dead_rings() -> None:
    """Remove the rings that killed runs of this user left on this machine, never those of living ones."""
    for directory in SHARED_MEMORY.glob(f"{_ring_prefix()}*"):
        reap(directory)


def tidy(job: ResolvedJob) -> None:
    """Remove what only running processes need: token, endpoints, weights on their way, frames.

    Called when no process of the run lives; frames stay when the job wants them to.
    """
    layout, transport = job.layout, job.job.spec.transport
    layout.token.unlink(missing_ok=True)
    shutil.rmtree(layout.endpoints, ignore_errors=True)
    shutil.rmtree(layout.weights, ignore_errors=True)
    if job.ring_dir is not None:
        reap(job.ring_dir)
    if transport.spill_path is not None:
        remove_leftovers(Path(transport.spill_path))
    if transport.object.retention is Retention.TRAINED:
        shutil.rmtree(layout.records, ignore_errors=True)
    for pattern in ("*.tmp", "*.partial", "checkpoints/.*.partial"):
        for unfinished in layout.root.glob(pattern):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()


def remove_objects(job: ResolvedJob) -> None:
    """Delete the objects that this job left in an object store outside of the run directory.

    Called when no process of the run lives: who was killed, or stopped in the middle of a step, deletes
    nothing. TransportError when the store cannot be reached.
    """
    transport = job.job.spec.transport
    uses_it = transport.only_object or transport.spill is Spill.OBJECT_STORE
    if transport.object.uri is None or transport.object.retention is not Retention.TRAINED or not uses_it:
        return
    # With fsspec, whose import would delay every other run.
    from tracerl.transport.objects.filesystem import open_filesystem  # noqa: PLC0415
    from tracerl.transport.objects.source import ObjectSource  # noqa: PLC0415

    filesystem = open_filesystem(
        job.records_uri,
        endpoint_url=transport.object.endpoint_url,
        credentials=job.credentials_dir,
        deadline_seconds=min(transport.deadline_seconds, _OBJECTS_SECONDS),
    )
    retention = transport.object.retention
    source = ObjectSource(filesystem, job_uid=job.job_uid, run_id="no-run", retention=retention)
    try:
        source.start_run()
    finally:
        source.close()
