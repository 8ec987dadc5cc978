"""The resolved job: the one document that every process of a run reads, and the layout of a run directory.

`tracerl run` writes it to ``<run>/job.yaml`` with every default spelled out; on a cluster the operator mounts
it. It holds no secret: the bearer token of the HTTP endpoints is in a file of its own (mode 0600). A server
without a `url` takes a free port and publishes it as an `EndpointFile`, so that two runs on one machine never
meet.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from tracerl.api.errors import InputError
from tracerl.api.job import UID_PATTERN, Model, RolloutEngine, TraceRLJob


class Endpoint(Model):
    """One HTTP server of a run. The name is also that of its process and its log."""

    name: Annotated[str, Field(pattern=r"^(rollout|store|trainer)-[0-9]+$")]
    url: str | None = None
    """Address that clients use and whose port the server binds; None: see `Endpoints.directory`.

    On a cluster the first trainer process of a pod has one, for all of them.
    """
    node: str | None = None
    """Node that the process runs on: processes of one node share memory."""


class Endpoints(Model):
    """How the processes of a run find each other."""

    directory: Path | None = None
    """Where a server without a `url` publishes ``<name>.json``; None where all have one."""
    rollout: list[Endpoint] = Field(min_length=1)
    store: list[Endpoint] = Field(default_factory=list)
    """Record stores, the i-th beside the i-th rollout; none where frames travel by the object store alone."""
    trainer: list[Endpoint] = Field(default_factory=list)
    """Trainer processes by rank."""
    rendezvous: str | None = None
    """host:port of trainer 0 for the groups that weights travel in; None on one machine."""
    meeting: str | None = None
    """host:port of trainer 0 where the trainers meet; None on one machine, see `RunLayout.meeting`."""


class ResolvedJob(Model):
    """The job with every default filled in, and what only the one who starts it knows. Paths are absolute."""

    job: TraceRLJob
    job_uid: Annotated[str, Field(max_length=64, pattern=UID_PATTERN)]
    """UID of the resource on a cluster, random on one machine; the same for every resumption of a run."""
    run_dir: Path
    """Checkpoints, logs and metrics and, on one machine, everything in `RunLayout`."""
    cache_dir: Path
    """What outlives runs, such as warmed-up weights."""
    token_file: Path
    """Bearer token of every endpoint that changes or reads data."""
    credentials_dir: Path | None = None
    """Files of the secret for `spec.transport.object`; None where the environment has the credentials."""
    output_uri: str | None = None
    """The run's own place in an object store, whose copy `run_dir` then is; None where `run_dir` stays."""
    output_credentials_dir: Path | None = None
    """Files of the secret for `output_uri`; None where the environment has the credentials."""
    ring_dir: Path | None = None
    """Directory in shared memory with one directory a record store of the node; None where there is none."""
    endpoints: Endpoints

    @property
    def layout(self) -> RunLayout:
        """Paths inside the run directory."""
        return RunLayout(self.run_dir)

    @property
    def on_cluster(self) -> bool:
        """Whether every process is in a pod, where no `tracerl run` looks after them."""
        return self.endpoints.directory is None

    @property
    def appear_seconds(self) -> float:
        """How long a process may take to appear.

        On a cluster a pod is placed and an image pulled first; SGLang's processes import for minutes where
        cores are busy.
        """
        slow = self.on_cluster or self.job.spec.rollout.engine is RolloutEngine.SGLANG
        return 900.0 if slow else 300.0

    @property
    def records_uri(self) -> str:
        """Directory that frames are put into, as an fsspec URL."""
        # fsspec takes the path behind file:// as it stands: %20 would be no space.
        return self.job.spec.transport.object.uri or f"file://{self.layout.records}"

    def node(self, name: str) -> str | None:
        """Node of a process by its name; KeyError when the job has no such process."""
        endpoints = (*self.endpoints.store, *self.endpoints.rollout, *self.endpoints.trainer)
        return {endpoint.name: endpoint.node for endpoint in endpoints}[name]

    def store_place(self, name: str) -> StorePlace:
        """Where a record store has its ring and its socket; ValueError when the job has no ring."""
        if self.ring_dir is None:
            raise ValueError(f"{name} has no ring: frames of this job travel by the object store")
        return StorePlace(self.ring_dir / name)

    def token(self) -> str:
        """Read the bearer token; InputError when it is not there."""
        try:
            return self.token_file.read_text(encoding="ascii").strip()
        except OSError as error:
            raise InputError(
                f"{self.token_file} cannot be read ({error.strerror}); start the run with tracerl run"
            ) from None

    def write(self, path: Path) -> None:
        """Write the document; a reader never sees half of it."""
        document = self.model_dump(mode="json", by_alias=True)
        head = "# Written by tracerl: the resolved job of this run.\n"
        write_atomically(path, head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True))

    @classmethod
    def read(cls, path: Path) -> ResolvedJob:
        """Read a document that `write` wrote; InputError when it is not one."""
        try:
            return cls.model_validate(read_yaml(path))
        except OSError as error:
            problem = str(error.strerror)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(str(part) for part in first['loc']) or 'document'}: {first['msg']}"
        except (UnicodeDecodeError, yaml.YAMLError):
            problem = "not YAML"
        except (ValueError, RecursionError):
            problem = "a part of it holds itself, or it is nested too deep"
        raise InputError(f"{path} is not a resolved job ({problem}); start again in a new directory")


class EndpointFile(Model):
    """What a server publishes when it accepts connections, and removes when it stops."""

    url: str
    """Base URL without a trailing slash, for example ``http://127.0.0.1:41873``."""
    pid: int
    instance_id: str
    """Random for each start of the process: who sees another one knows that the server restarted."""

    def publish(self, path: Path) -> None:
        """Write the file so that a reader sees all of it or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json(by_alias=True) + "\n")

    @classmethod
    def read(cls, path: Path) -> EndpointFile | None:
        """Read the published endpoint, or None when there is none yet."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return cls.model_validate_json(text)


@dataclass(frozen=True)
class StorePlace:
    """The directory of a record store in shared memory, made by the store and removed when it stops."""

    directory: Path

    @property
    def ring(self) -> Path:
        """The ring of segments; locked (flock) as long as the store lives."""
        return self.directory / "ring"

    @property
    def socket(self) -> Path:
        """Unix socket for producers and readers of this node."""
        return self.directory / "socket"


@dataclass(frozen=True)
class RunLayout:
    """Where everything of a run is."""

    root: Path

    @property
    def job(self) -> Path:
        """The resolved job."""
        return self.root / "job.yaml"

    @property
    def lock(self) -> Path:
        """Locked (flock) as long as any process of the run lives; holds the process id of `tracerl run`."""
        return self.root / "lock"

    @property
    def token(self) -> Path:
        """Bearer token of the run's HTTP endpoints, mode 0600; new at every start, gone at its end."""
        return self.root / "token"

    @property
    def endpoints(self) -> Path:
        """Endpoint files of the servers."""
        return self.root / "endpoints"

    @property
    def meeting(self) -> Path:
        """Through which several trainers find each other; new at every start of them."""
        return self.endpoints / "trainers"

    def log(self, name: str) -> Path:
        """Log of a process, appended to by every start of it."""
        return self.root / "logs" / f"{name}.log"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One JSON object an event."""
        return self.root / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files, with spec.observe.tensorboard."""
        return self.root / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """step-NNNNNN directories."""
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        """Weights on their way to the rollout, with weightSync Disk."""
        return self.root / "weights"

    @property
    def model(self) -> Path:
        """The trained model in Hugging Face's layout, written when all steps are done."""
        return self.root / "model"

    @property
    def records(self) -> Path:
        """Frames, unless the job names another place."""
        return self.root / "records"

    @property
    def report(self) -> Path:
        """The report page."""
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        """The figures of the report as JSON."""
        return self.root / "summary.json"

    @property
    def result(self) -> Path:
        """How the run ended: state Complete, Failed or Stopped, reason, message, restarts."""
        return self.root / "result.json"


def read_yaml(path: Path) -> Any:
    """Read a YAML document of which no part holds itself: whoever walks through one would never arrive.

    Raises OSError, yaml.YAMLError, RecursionError, and ValueError: not UTF-8, no date, a part in itself.
    """
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    json.dumps(document, default=str, skipkeys=True)
    return document


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader or a crash sees the old or the new content, never a part.

    Raises OSError when the directory is missing, not writable or full, or when what is there is no file of
    its own: a directory, a link, a pipe, a device such as /dev/null. Nothing is left behind then.
    """
    require_replaceable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_replaceable(path: Path) -> None:
    """Raise OSError when `write_atomically` would take the place of something that is no file of its own."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "what is there is no regular file", str(path))
