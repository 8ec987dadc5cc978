"""A real single-node Kubernetes on this machine, for tests.

`python tests/cluster/cluster.py up`, `down`, `kubectl …`.

Everything but runc, the CNI plugins and the packet filter's tools (Debian packages) is built from Go modules
by build.sh. The components run in namespaces of their own (node.py), so a cluster meets no other one on the
machine and leaves nothing behind that runs or is mounted. TRACERL_CLUSTER_NUMBER (0 to 15) lets several lie
side by side, TRACERL_CLUSTER_CACHE moves all that is on disk away from .cache/cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node import CLUSTERS, NAME, Place
from oci import load_image

ROOT = Path(__file__).parents[2]
_NODE = Path(__file__).with_name("node.py").resolve()
_START_SECONDS = 180.0
# Each program and the Debian package that has it.
_PACKAGES = {
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "busybox": "busybox-static",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "openssl": "openssl",
}
# One replica needs no leader, and one that loses its lease on a busy machine ends. By default Kueue would be
# asked about every pod of the cluster, too.
_KUEUE = """apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
health: {healthProbeBindAddress: ":8081"}
metrics: {bindAddress: ":8443"}
webhook: {port: 9443}
leaderElection: {leaderElect: false}
clientConnection: {qps: 50, burst: 100}
integrations: {frameworks: [batch/job, jobset.x-k8s.io/jobset]}
"""
_APPLETS = "sh sleep cat ls df echo id env head grep sed date test true false touch mkdir rm ps nc httpd"


class ClusterError(Exception):
    """What is missing or went wrong, in one sentence and what to do about it."""


def here() -> Place:
    """The place that the environment names."""
    cache = os.environ.get("TRACERL_CLUSTER_CACHE") or ROOT / ".cache/cluster"
    number = os.environ.get("TRACERL_CLUSTER_NUMBER", "0")
    if not (number.isdigit() and int(number) < CLUSTERS):
        raise ClusterError(f"TRACERL_CLUSTER_NUMBER is {number!r}: write a number from 0 to {CLUSTERS - 1}")
    return Place(Path(cache).resolve(), int(number))


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def require() -> None:
    """ClusterError that says what this machine lacks."""
    if os.geteuid() != 0:
        raise ClusterError("a cluster needs root for namespaces, mounts and cgroups: run as root, or in a VM")
    missing = sorted({package for program, package in _PACKAGES.items() if _program(program) is None})
    if missing:
        raise ClusterError(
            f"the cluster's node needs Debian packages: 'apt-get install {' '.join(missing)}', and try again"
        )


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def _children(pid: int) -> list[int]:
    """Host ids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in the second field may hold spaces and brackets.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return found


class Cluster:
    """The cluster of one place, up or not."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = Path(f"/run/tracerl-cluster-{place.number}.lock")
        self._unshare: subprocess.Popen[bytes] | None = None

    # Asking it

    def kubectl(
        self, *arguments: str, input: str | None = None, check: bool = True, seconds: float = 120
    ) -> str:
        """Run kubectl as the administrator and give what it wrote; RuntimeError when it fails."""
        return self._ask([self.place.kube, "kubectl", *arguments], input, check, seconds)

    def helm(self, *arguments: str) -> str:
        """Run helm as the administrator."""
        return self._ask([self.place.bin / "helm", *arguments], None, True, 660)

    def ctr(self, *arguments: str) -> str:
        """Run containerd's own client in the namespace of Kubernetes."""
        return self._ask(self._ctr(*arguments), None, True, 60)

    def start_ctr(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._ctr(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def _ctr(self, *arguments: str) -> list[str | Path]:
        return [
            self.place.bin / "ctr",
            "--address",
            str(self.place.socket),
            "--namespace",
            "k8s.io",
            *arguments,
        ]

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which kubectl, helm and Kubernetes' clients find this cluster."""
        home = str(self.place.data / "home")
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "TERM") if key in os.environ}
        return {**kept, "HOME": home, "KUBECONFIG": str(self.place.kubeconfig)}

    def _ask(self, command: list[Any], input: str | None, check: bool, seconds: float) -> str:
        what = " ".join([Path(command[0]).name, *map(str, command[1:])])
        try:
            done = subprocess.run(
                command,
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                capture_output=True,
                text=True,
                check=False,
                env=self.environment,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{what}: no answer in {seconds:.0f} s") from None
        if check and done.returncode:
            raise RuntimeError(f"{what}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def images(self) -> dict[str, str]:
        """Every image's name and the digest that it stands for."""
        rows = self.ctr("images", "ls").splitlines()[1:]
        return {row.split()[0]: row.split()[2] for row in rows}

    # Its processes, from this machine

    def _process(self) -> tuple[int, list[str]] | None:
        """The node's process 1: this machine's id of it, and its command line."""
        expected = [str(self.place.cache), str(self.place.number)]
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                command = _command_line(int(entry.name))
                if command[1:2] == [str(_NODE)] and command[2:4] == expected:
                    return int(entry.name), command
        return None

    @property
    def node(self) -> int | None:
        """This machine's id of the node's process 1; None when the cluster is down."""
        found = self._process()
        return None if found is None else found[0]

    def daemon(self, name: str) -> int | None:
        """This machine's id of a daemon of the node, None while it does not run."""
        if self.node is None:
            return None
        for pid in _children(self.node):
            command = _command_line(pid)
            if name in (Path(command[0]).name if command else "", *command[1:2]):
                return pid
        return None

    def hold(self, name: str) -> None:
        """Kill a daemon and keep it from coming back until release()."""
        (self.place.held / name).touch()
        self.kill(name)

    def release(self, name: str) -> None:
        (self.place.held / name).unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Kill a daemon as a crash would; unless held it comes back at once."""
        pid = self.daemon(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        self.poll(lambda: not _command_line(pid), f"the end of {name}", 20)

    def cgroups(self) -> list[Path]:
        """The parents of all pods' cgroups: one, or one a hierarchy in version 1."""
        root, name = Path("/sys/fs/cgroup"), self.place.cgroup
        return [path for path in (root / name, *root.glob(f"*/{name}")) if path.is_dir()]

    def files(self, path: str) -> Path:
        """A path of the node, such as /dev/shm, as this machine sees it."""
        return Path(f"/proc/{self.node}/root") / path.lstrip("/")

    @staticmethod
    def poll(ready: Callable[[], Any], what: str, seconds: float) -> Any:
        """Call until it answers something true; TimeoutError otherwise."""
        deadline = time.monotonic() + seconds
        last: Exception | None = None
        while True:
            asked = time.monotonic()
            try:
                if answer := ready():
                    return answer
            except (RuntimeError, OSError) as error:
                last = error
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{what} is not there after {seconds:.0f} s" + (f": {last}" if last else "")
                )
            # Whoever waits leaves the machine to what is waited for: kubectl takes a quarter of a second.
            time.sleep(max(0.1, 3 * (time.monotonic() - asked)))

    # Up and down

    @property
    def owner(self) -> int | None:
        """The process that the cluster ends with; None for one that was asked for by hand, or is down."""
        found = self._process()
        return int(found[1][5]) if found is not None and found[1][5:] else None

    @property
    def is_ready(self) -> bool:
        """Whether up() came to its end."""
        return self.node is not None and (self.place.run / "ready").exists()

    def up(self, *, owned: bool = False, say: Callable[[str], None] = lambda _: None) -> None:
        """Start the cluster, or leave nothing; what an earlier run left is removed first.

        An owned cluster ends with this process, however that ends.
        """
        require()
        for name in ("kube", "containerd", "ctr", "helm", "jobset"):
            if not (self.place.bin / name).exists():
                raise ClusterError(f"{name} is not built: run 'bash tests/cluster/build.sh' and try again")
        self.down()
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ClusterError(
                f"cluster {self.place.number} is being started by another run: wait for it, or take another "
                "number (TRACERL_CLUSTER_NUMBER)"
            ) from None
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            self._start(lock, owned)
            self._prepare(say)
        except BaseException:
            os.close(lock)
            self.down()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        # The node's processes keep it: it is free when the last of them has ended.
        os.close(lock)

    def _start(self, lock: int, owned: bool) -> None:
        place = self.place
        for directory in (place.data / "home", place.logs):
            directory.mkdir(parents=True, exist_ok=True)
        place.run.mkdir(exist_ok=True)
        for log in place.logs.iterdir():
            log.unlink()
        peer = f"{place.link}n"
        # The kernel takes an ended node's link away a moment after it.
        self.poll(
            lambda: self._ip("link", "add", place.link, "type", "veth", "peer", "name", peer), place.link, 10
        )
        passed, more = [lock], []
        if owned:
            # Nobody else has the other end, so the node sees it closed when this process ends.
            reading, self._pipe = os.pipe()
            passed.append(reading)
            more += [str(reading), str(os.getpid())]
        with (place.logs / "node.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                [
                    *("unshare", "--fork", "--kill-child", "--pid", "--mount", "--net"),
                    *("--mount-proc", "--propagation", "slave"),
                    *(sys.executable, _NODE, place.cache, str(place.number), *more),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=passed,
            )
        if owned:
            os.close(reading)
        unshare = self._unshare

        def begun() -> int | None:
            if unshare.poll() is not None:
                raise ClusterError(f"this machine gives no namespaces to a cluster: {self.log('node')}")
            return self.node

        node = self.poll(begun, "the node's process", 30)
        self._ip("link", "set", peer, "netns", str(node), "name", "host0")
        self._ip("address", "add", f"{place.host}/20", "dev", place.link)
        self._ip("link", "set", place.link, "up")
        self._ip("route", "add", place.services, "via", place.node)

    @staticmethod
    def _ip(*arguments: str) -> bool:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
        return True

    def _prepare(self, say: Callable[[str], None]) -> None:
        """What a client has to do before pods can run."""
        place, start = self.place, time.monotonic()

        def wait(ready: Callable[[], Any], what: str) -> None:
            def alive() -> Any:
                if self.node is None:
                    raise ClusterError(f"the node ended: {self.log('node')}")
                return ready()

            try:
                self.poll(alive, what, _START_SECONDS)
            except TimeoutError as error:
                raise ClusterError(f"{error}; look into {place.logs}") from error
            say(f"{time.monotonic() - start:5.1f} s  {what}")

        wait(lambda: self.ctr("version"), "containerd")
        self._forget_containers()
        wait(lambda: self.ctr("version"), "containerd")
        self._load_pause()
        wait(lambda: self.kubectl("get", "--raw", "/readyz", seconds=10) == "ok", "API server")
        self.kubectl(
            "apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": self._dns()})
        )
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        wait(lambda: self.kubectl("get", "node", NAME, "-o", ready) == "True", "node")
        # Pods are refused before it is there.
        wait(lambda: self.kubectl("get", "serviceaccount", "default", "-o", "name"), "service account")
        (place.run / "ready").touch()

    def log(self, daemon: str, lines: int = 20) -> str:
        """The last lines that a daemon wrote."""
        try:
            return "\n".join((self.place.logs / f"{daemon}.log").read_text().splitlines()[-lines:])
        except OSError as error:
            return str(error)

    def _forget_containers(self) -> None:
        """Remove what containerd remembers of an earlier node's containers, and let it start afresh."""
        containers = self.ctr("containers", "ls", "-q").split()
        sandboxes = [row.split()[0] for row in self.ctr("sandboxes", "ls").splitlines()[1:]]
        if containers:
            self.ctr("containers", "rm", *containers)
        if sandboxes:
            self.ctr("sandboxes", "rm", "--force", *sandboxes)
        if containers or sandboxes:
            self.kill("containerd")

    def _dns(self) -> list[dict[str, Any]]:
        meta = {"name": "kube-dns", "namespace": "kube-system"}
        ports = [
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        ]
        service = {"clusterIP": self.place.dns, "ports": ports}
        return [
            {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**meta, "labels": {"kubernetes.io/service-name": "kube-dns"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [self.place.node]}],
                "ports": ports,
            },
        ]

    def _load_pause(self) -> None:
        """The image of every pod's sandbox, with a shell that tests use too."""
        busybox = _program("busybox")
        assert busybox is not None
        tree = self.place.data / "trees/pause"
        if not tree.exists():
            (tree / "bin").mkdir(parents=True)
            (tree / "tmp").mkdir()
            (tree / "tmp").chmod(0o1777)
            shutil.copy(busybox, tree / "bin/busybox")
            for applet in _APPLETS.split():
                (tree / "bin" / applet).symlink_to("busybox")
        config = {"Cmd": ["/bin/sleep", "1000000000"]}
        load_image(self, {"name": "localhost/pause:1", "config": config, "layers": [{"directory": tree}]})

    def install(self, controller: str) -> None:
        """Install JobSet or Kueue by its own chart, and wait until it serves its webhooks."""
        program = self.place.bin / controller
        if not program.exists():
            raise ClusterError(
                f"{controller} is not built: run 'bash tests/cluster/build.sh {controller}' and try again"
            )
        tree = self.place.data / "trees" / controller
        if not (tree / "tmp").exists():
            (tree / "tmp").mkdir(parents=True)
            (tree / "tmp").chmod(0o1777)
        # Linked as it is, and again only when it was built anew.
        (tree / "manager").unlink(missing_ok=True)
        (tree / "manager").hardlink_to(program)
        name = f"localhost/{controller}"
        config = {"User": "65532:65532", "Entrypoint": ["/manager"]}
        load_image(self, {"name": f"{name}:test", "config": config, "layers": [{"directory": tree}]})
        image = {"repository": name, "tag": "test", "pullPolicy": "Never"}
        resources = {"requests": {"cpu": "20m", "memory": "64Mi"}, "limits": {"memory": "1Gi"}}
        values: dict[str, dict[str, Any]] = {
            "jobset": {
                "image": image,
                "controller": {"leaderElection": {"enable": False}, "resources": resources},
            },
            "kueue": {
                "controllerManager": {
                    "manager": {"image": image, "resources": resources},
                    "livenessProbe": {"timeoutSeconds": 20},
                    "readinessProbe": {"timeoutSeconds": 10},
                },
                "managerConfig": {"controllerManagerConfigYaml": _KUEUE},
            },
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values[controller], file)
            file.flush()
            self.helm(
                *("upgrade", "--install", controller, str(self.place.cache / "charts" / controller)),
                *("--namespace", f"{controller}-system", "--create-namespace", "--values", file.name),
                *("--wait", "--timeout", "600s"),
            )

    def down(self) -> None:
        """End the cluster and remove what it left, whatever state it is in."""
        place = self.place
        if (node := self.node) is not None:
            os.kill(node, signal.SIGKILL)
        if self._unshare is not None:
            # It takes along a node that has hardly begun.
            self._unshare.kill()
            self._unshare.wait()
            node, self._unshare = self._unshare.pid, None
        if self._lock.exists():
            with self._lock.open() as lock:
                deadline = time.monotonic() + 30
                while True:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if node is None or time.monotonic() > deadline:
                            raise ClusterError(
                                f"cluster {place.number} is being started or ended by another run: wait "
                                "for it, or take another number (TRACERL_CLUSTER_NUMBER)"
                            ) from None
                        time.sleep(0.05)
                self._clean()

    def _clean(self) -> None:
        place = self.place
        with contextlib.suppress(RuntimeError):
            self._ip("link", "del", place.link)
        for root in self.cgroups():
            for directory, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    Path(directory).rmdir()
        # Its mounts went with its namespace: what is found here is plain files.
        for directory in (place.run, place.data / "etcd", place.data / "var", place.held):
            shutil.rmtree(directory, ignore_errors=True)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say what this machine lacks")
    up = commands.add_parser("up", help="start the cluster with JobSet")
    up.add_argument("--kueue", action="store_true", help="install Kueue too")
    commands.add_parser("down", help="end it; images stay on disk")
    for name in ("kubectl", "helm", "ctr"):
        commands.add_parser(name, help=f"{name} of this cluster, with all that follows")
    commands.add_parser("image", help="import images from their documents").add_argument(
        "file", nargs="+", type=Path
    )
    # What follows a program is its own, so that no -- or --help is taken from it.
    program, rest = sys.argv[1:2], sys.argv[2:]
    try:
        cluster = Cluster(here())
        place = cluster.place
        programs = {
            "kubectl": [str(place.kube), "kubectl"],
            "helm": [str(place.bin / "helm")],
            "ctr": [str(each) for each in cluster._ctr()],
        }
        if program and program[0] in programs:
            command = programs[program[0]]
            os.execve(command[0], [*command, *rest], {**os.environ, "KUBECONFIG": str(place.kubeconfig)})
        arguments = parser.parse_args()
        if arguments.command == "check":
            require()
        elif arguments.command == "up":
            if cluster.is_ready:
                _say(f"cluster {place.number} is up")
            else:
                cluster.up(say=_say)
            for controller in ["jobset", *(["kueue"] if arguments.kueue else [])]:
                start = time.monotonic()
                cluster.install(controller)
                _say(f"{time.monotonic() - start:5.1f} s  {controller}")
            _say(f"export KUBECONFIG={place.kubeconfig}")
        elif arguments.command == "down":
            cluster.down()
        elif arguments.command == "image":
            for file in arguments.file:
                document = json.loads(file.read_text())
                done = load_image(cluster, document)
                _say(f"{document['name']} {'imported' if done else 'was there'}")
    except (ClusterError, RuntimeError, TimeoutError) as error:
        sys.stderr.write(f"make: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
