"""`tracerl doctor`: what of this machine a local run needs, what is there, and how to get what is not.

With a job, also whether its records have room: the ring in shared memory, the spill directory, and the object
store, which is written to, read, listed and cleaned.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tracerl.api.errors import InputError, first_line, how_to_install
from tracerl.api.job import Spill, TraceRLJob, quantity_bytes
from tracerl.runtime.interpreters import interpreter, needs, require_packages
from tracerl.runtime.rundir import OPEN_FILES, SHARED_MEMORY, cache_directory
from tracerl.transport.base import TransportError

_GIB = 2**30
_MIB = 2**20
_LIBRARIES = (
    "aiohttp",
    "fsspec",
    "jinja2",
    "matplotlib",
    "numpy",
    "prometheus_client",
    "rich",
    "safetensors",
)
_MEMORY = 4 * _GIB
_DISK = 2 * _GIB
_RING = 256 * _MIB
"""What spec.transport.ring.size is by default."""
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis. `remedy` says how to get what is missing, or what it would be good for."""

    name: str
    ok: bool
    found: str
    remedy: str
    needed: bool = True

    def __str__(self) -> str:
        """Give the line."""
        state = "ok" if self.ok else "missing" if self.needed else "absent"
        return f"{state:<8} {self.name}: {self.found}" + ("" if self.ok else f"; {self.remedy}")


def examine(job: TraceRLJob | None = None) -> Iterator[Check]:
    """Look at this machine, quick things first, and at where a job's records go; the checks never raise."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Check(
        "Python", (3, 11) <= sys.version_info[:2] <= (3, 13), version, "install Python 3.11, 3.12 or 3.13"
    )
    yield Check(
        "system",
        sys.platform == "linux",
        f"{platform.system()} {platform.machine()}",
        "run jobs on Linux: processes are tied to their parent by the kernel",
    )
    yield _packages()
    yield _torch()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check(
        "CPU", cores >= 2, f"{cores} usable", "a second core lets rollout and trainer run side by side", False
    )
    yield _memory()
    if job is None or not job.spec.transport.only_object:
        yield _shared_memory(job)
    yield _open_files()
    yield _cache()
    if job is not None:
        yield from _engines(job)
    gym = importlib.util.find_spec("reasoning_gym") is not None
    yield Check(
        "reasoning-gym",
        gym,
        _version("reasoning-gym") if gym else "not installed",
        f"for tasks reasoning_gym/…: {how_to_install('tasks')}",
        needed=False,
    )
    yield _gpu(job)
    if job is not None:
        yield from _places_of_records(job)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _packages() -> Check:
    absent = [name for name in (*_LIBRARIES, "xxhash") if importlib.util.find_spec(name) is None]
    found = f"{', '.join(absent)} not installed" if absent else "all of the extra jobs"
    return Check("packages", not absent, found, how_to_install("jobs"))


def _torch() -> Check:
    remedy = how_to_install("jobs")
    if importlib.util.find_spec("torch") is None:
        return Check("torch", False, "not installed", remedy)
    try:
        version = str(importlib.import_module("torch").__version__)
    except (ImportError, OSError) as error:
        return Check("torch", False, f"cannot be loaded ({first_line(error)})", remedy)
    major, minor = (int(part) for part in version.split(".")[:2])
    return Check("torch", (major, minor) >= (2, 7), version, "install torch 2.7 or newer")


def _memory() -> Check:
    limit = Path("/sys/fs/cgroup/memory.max")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = limit.read_text(encoding="ascii").strip()
    except OSError:
        text = "max"
    usable = min(total, int(text)) if text.isdecimal() else total
    return Check(
        "memory",
        usable >= _MEMORY,
        f"{usable / _GIB:.1f} GiB",
        f"give this machine {_MEMORY // _GIB} GiB",
    )


def _open_files() -> Check:
    # `tracerl run` raises the soft limit by itself.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = limit == resource.RLIM_INFINITY
    found = "any number allowed" if unlimited else f"{limit} allowed"
    remedy = f"raise the hard limit (ulimit -Hn) to {OPEN_FILES} or more where this shell is started"
    return Check("open files", unlimited or limit >= OPEN_FILES, found, remedy)


def _shared_memory(job: TraceRLJob | None) -> Check:
    wanted = _RING if job is None else quantity_bytes(job.spec.transport.ring.size) * job.spec.rollout.nodes
    remedy = (
        "lower spec.transport.ring.size, or make it larger: docker run --shm-size, mount -o remount,size="
    )
    if job is None:
        return _checked("shared memory", lambda: _free(SHARED_MEMORY), SHARED_MEMORY, wanted, remedy)
    nodes = job.spec.rollout.nodes
    times = f"{nodes} × " if nodes > 1 else ""
    what = f"{times}{_size(wanted // nodes)} of "
    return _checked("ring", lambda: _free(SHARED_MEMORY), SHARED_MEMORY, wanted, remedy, what=what)


def _free(path: Path) -> int:
    """Bytes free in a directory, once a file was written there; OSError."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(b"x")
    return shutil.disk_usage(path).free


def _checked(
    name: str, free: Callable[[], int], path: Path, wanted: int, remedy: str, *, what: str = ""
) -> Check:
    try:
        there = free()
    except OSError as error:
        return Check(name, False, f"{path}: {(error.strerror or str(error)).lower()}", remedy)
    return Check(name, there >= wanted, f"{what}{_size(there)} free in {path}", f"{remedy} ({_size(wanted)})")


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def _cache() -> Check:
    path = cache_directory()
    remedy = "name a directory with room in TRACERL_CACHE"

    def free() -> int:
        path.mkdir(parents=True, exist_ok=True)
        return _free(path)

    return _checked("cache", free, path, _DISK, remedy)


def _gpu(job: TraceRLJob | None) -> Check:
    needed = job is not None and job.spec.rollout.gpus_per_node + job.spec.trainer.gpus_per_node > 0
    remedy = "not needed where spec.rollout.gpusPerNode and spec.trainer.gpusPerNode are 0"
    if needed:
        remedy = "install the driver and PyTorch for CUDA, or write 0 for both gpusPerNode"
    if importlib.util.find_spec("torch") is None:
        return Check("GPU", False, "unknown without torch", remedy, needed=needed)
    try:
        cuda = importlib.import_module("torch").cuda
        names = [cuda.get_device_name(index) for index in range(cuda.device_count())]
    except (ImportError, OSError, RuntimeError) as error:
        return Check("GPU", False, first_line(error), remedy, needed=needed)
    return Check("GPU", bool(names), ", ".join(names) or "none", remedy, needed=needed)


def _engines(job: TraceRLJob) -> Iterator[Check]:
    """Say which interpreter each role with an engine of its own has, and whether the engine is there."""
    for need in needs(job.spec):
        if not need.field.endswith(".engine"):
            continue
        try:
            found = interpreter(need.role)
            require_packages(job.spec, need.role)
        except InputError as error:
            sentence, _, remedy = str(error).partition("; ")
            yield Check(need.package, False, sentence, remedy)
        else:
            yield Check(need.package, True, f"in {found}", need.remedy)


def _places_of_records(job: TraceRLJob) -> Iterator[Check]:
    transport = job.spec.transport
    if transport.spill_path is not None:
        path = Path(transport.spill_path)
        wanted = quantity_bytes(transport.spill_limit) if transport.spill_limit is not None else 0
        remedy = "name a directory with room in spec.transport.spillPath, or lower spillLimit"
        yield _checked("spill directory", lambda: _free(path), path, wanted, remedy)
    if transport.object.uri is not None and (transport.only_object or transport.spill is Spill.OBJECT_STORE):
        yield _object_store(job)


def _object_store(job: TraceRLJob) -> Check:
    store = job.spec.transport.object
    assert store.uri is not None
    name, remedy = "object store", "correct spec.transport.object"
    try:
        # With fsspec, which may not be installed: a line above says how to get it.
        filesystems = importlib.import_module("tracerl.transport.objects.filesystem")
    except ImportError as error:
        return Check(name, False, f"cannot be tried ({error})", how_to_install("jobs"))
    try:
        filesystem = filesystems.open_filesystem(
            store.uri, endpoint_url=store.endpoint_url, deadline_seconds=_PROBE_SECONDS
        )
        filesystem.probe()
        filesystem.close()
    except TransportError as error:
        found, _, what = str(error).partition("; ")
        return Check(name, False, found, what or remedy)
    return Check(name, True, f"{filesystem.where} takes, gives back, lists and deletes objects", remedy)
