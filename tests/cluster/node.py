"""One node with a whole Kubernetes on it, in namespaces of its own.

cluster.py starts this file as process 1 of a new process, mount and network namespace. So ports, addresses,
packet filters and mounts meet nobody else's, and killing process 1 ends and removes all of it, containers
too. What remains is what is on disk and the cgroups, both below names of our own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

NAME = "node1"
CLUSTERS = 16
_RESTART_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a cluster lies on this machine; another number lies beside it.

    Addresses are from 198.18.0.0/15, which is reserved for tests, so that no network in use is hidden.
    """

    cache: Path
    number: int

    @property
    def bin(self) -> Path:
        return self.cache / "bin"

    @property
    def kube(self) -> Path:
        return self.bin / "kube"

    @property
    def data(self) -> Path:
        """Files of the cluster; images stay here from run to run."""
        return self.cache / f"cluster-{self.number}"

    @property
    def run(self) -> Path:
        """Sockets and state that end with the cluster; short, as the path of a socket must be."""
        return Path(f"/run/tracerl-cluster-{self.number}")

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def certificates(self) -> Path:
        return self.data / "certificates"

    @property
    def held(self) -> Path:
        """A file NAME in here keeps the daemon NAME from being started again."""
        return self.data / "held"

    @property
    def containerd(self) -> Path:
        return self.data / "containerd"

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        return self.data / "admin.kubeconfig"

    @property
    def cgroup(self) -> str:
        return f"tracerl-cluster-{self.number}"

    @property
    def link(self) -> str:
        """The interface of this machine on the cluster's network."""
        return f"tracerl{self.number}"

    def _address(self, half: int, last: int) -> str:
        return f"198.{half}.{16 * self.number}.{last}"

    @property
    def pods(self) -> str:
        return f"{self._address(18, 0)}/20"

    @property
    def services(self) -> str:
        return f"{self._address(19, 0)}/20"

    @property
    def node(self) -> str:
        """Address of the node, the API server and the DNS server."""
        return self._address(18, 1)

    @property
    def host(self) -> str:
        """Address of this machine as pods reach it."""
        return self._address(18, 2)

    @property
    def first_pod(self) -> str:
        return self._address(18, 16)

    @property
    def api(self) -> str:
        """Address of the service kubernetes.default."""
        return self._address(19, 1)

    @property
    def dns(self) -> str:
        return self._address(19, 10)


_KUBELET_TUNABLES = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def _mount(place: Place) -> None:
    """Give the node its own /dev/shm, and its own of every place that a component has in its code."""
    _run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    for name in ("lib/kubelet", "lib/cni", "log/pods", "log/containers"):
        ours, theirs = place.data / "var" / name, Path("/var") / name
        for each in (ours, theirs):
            each.mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", ours, theirs)
    # The kubelet sets these of the whole machine: it gets files of its own to set.
    tunables = place.data / "sys"
    tunables.mkdir(parents=True, exist_ok=True)
    for name in _KUBELET_TUNABLES:
        theirs = Path("/proc/sys", name)
        ours = tunables / name.replace("/", ".")
        ours.write_text(theirs.read_text())
        _run("mount", "--bind", ours, theirs)


def _network(place: Place) -> None:
    """A bridge that the CNI plugin joins pods to, and one end of the link to this machine in it."""
    address = f"{place.node}/20"
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "bridge0", "type", "bridge")
    _run("ip", "address", "add", address, "dev", "bridge0")
    _run("ip", "link", "set", "bridge0", "up")
    # kube-proxy rewrites what goes there; without a route nothing would.
    _run("ip", "route", "add", place.services, "dev", "bridge0")
    deadline = time.monotonic() + 10
    while subprocess.run(["ip", "link", "show", "host0"], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError("no link to the machine came")
        time.sleep(0.05)
    _run("ip", "link", "set", "host0", "master", "bridge0", "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    filtered = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
    if not filtered.exists():
        _run("modprobe", "br_netfilter")
    # Without it an answer from pod to pod through a service would pass the bridge with the wrong source.
    filtered.write_text("1")


def _cgroup(place: Place) -> None:
    """The parent of all pods' cgroups, in every hierarchy of version 1 or in the one of version 2."""
    root = Path("/sys/fs/cgroup")
    unified = root / "cgroup.subtree_control"
    if unified.exists():
        wanted = (root / "cgroup.controllers").read_text().split()
        unified.write_text(" ".join(f"+{name}" for name in wanted))
    for hierarchy in [root] if unified.exists() else root.iterdir():
        if hierarchy.is_dir() and not hierarchy.is_symlink():
            directory = hierarchy / place.cgroup
            directory.mkdir(exist_ok=True)
            # As a real node weighs its pods; else all of them would weigh as much as one process outside.
            cpus = os.cpu_count() or 1
            for name, weight in (("cpu.shares", 1024 * cpus), ("cpu.weight", min(100 * cpus, 10000))):
                if (directory / name).exists():
                    (directory / name).write_text(str(weight))


def _certificates(place: Place) -> None:
    directory = place.certificates
    directory.mkdir(exist_ok=True)
    empty = directory / "openssl.cnf"
    empty.write_text("[req]\ndistinguished_name = subject\n[subject]\n")

    def certify(name: str, subject: str, *options: str) -> None:
        # Keys on curves take milliseconds, so they are new at each start and never run out.
        _run(
            *("openssl", "req", "-x509", "-config", empty, "-days", "30", "-nodes", "-subj", subject),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-keyout", directory / f"{name}.key", "-out", directory / f"{name}.crt", *options),
        )

    authority = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign")
    certify("ca", "/CN=tracerl-cluster", *authority)
    certify("front-ca", "/CN=tracerl-cluster-front", *authority)

    def leaf(name: str, subject: str, names: str, by: str = "ca") -> None:
        usage = ("-addext", "extendedKeyUsage=serverAuth,clientAuth", "-addext", f"subjectAltName={names}")
        certify(name, subject, "-CA", f"{directory}/{by}.crt", "-CAkey", f"{directory}/{by}.key", *usage)

    service = "kubernetes.default.svc"
    dns = ("localhost", "kubernetes", "kubernetes.default", service, f"{service}.cluster.local")
    addresses = ("127.0.0.1", place.node, place.api)
    names = [*(f"DNS:{name}" for name in dns), *(f"IP:{address}" for address in addresses)]
    leaf("kube-apiserver", "/CN=kube-apiserver", ",".join(names))
    leaf("front", "/CN=front-proxy-client", "DNS:front-proxy-client", by="front-ca")
    leaf("admin", "/O=system:masters/CN=admin", "DNS:admin")
    leaf("kubelet", f"/O=system:nodes/CN=system:node:{NAME}", f"DNS:{NAME},IP:{place.node}")
    for component in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        leaf(component, f"/CN=system:{component}", f"DNS:{component}")
    for user in ("admin", "kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy"):
        certificate = {
            "client-certificate": f"{directory}/{user}.crt",
            "client-key": f"{directory}/{user}.key",
        }
        cluster = {"server": f"https://{place.node}:6443", "certificate-authority": f"{directory}/ca.crt"}
        _write(
            place.data / f"{user}.kubeconfig",
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "cluster", "cluster": cluster}],
                "users": [{"name": user, "user": certificate}],
                "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": user}}],
                "current-context": "cluster",
            },
        )
    _run("openssl", "genrsa", "-out", directory / "accounts.key", "2048")


def _write(path: Path, document: object) -> None:
    # JSON is YAML, and the components read either.
    path.write_text(json.dumps(document, indent=1))


def _configure(place: Place) -> None:
    (place.data / "containerd.toml").write_text(
        f"""version = 3
root = "{place.containerd}"
state = "{place.run}/containerd"
[grpc]
  address = "{place.socket}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  # A machine may withhold CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{place.data}/cni"
"""
    )
    (place.data / "cni").mkdir(exist_ok=True)
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": place.pods, "rangeStart": place.first_pod, "gateway": place.node}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "bridge0", "isGateway": True, "hairpinMode": True}
    _write(
        place.data / "cni/10-bridge.conflist",
        {
            "cniVersion": "1.0.0",
            "name": "tracerl",
            "plugins": [{**bridge, "ipMasq": False, "ipam": addresses}],
        },
    )
    _write(
        place.data / "kubelet.json",
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": f"{place.certificates}/ca.crt"},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{place.cgroup}",
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{place.socket}",
            "clusterDomain": "cluster.local",
            "clusterDNS": [place.dns],
            "tlsCertFile": f"{place.certificates}/kubelet.crt",
            "tlsPrivateKeyFile": f"{place.certificates}/kubelet.key",
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            # Images are imported, not pulled: what is collected would never come back.
            "imageGCHighThresholdPercent": 100,
            # A secret that a controller fills for itself reaches its mount with the next sync.
            "syncFrequency": "5s",
        },
    )
    _write(
        place.data / "kube-proxy.json",
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "hostnameOverride": NAME,
            "clusterCIDR": place.pods,
            "clientConnection": {"kubeconfig": f"{place.data}/kube-proxy.kubeconfig"},
            # Else it writes sysctls that belong to the machine.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        },
    )
    # A peer's name is asked for before its pod is there: remember that briefly. Names outside do not exist.
    (place.data / "Corefile").write_text(
        f"""cluster.local:53 in-addr.arpa:53 {{
  bind {place.node}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {place.kubeconfig}
    pods insecure
    ttl 5
  }}
  cache 5 {{
    denial 1024 1
  }}
}}
.:53 {{
  bind {place.node}
  errors
  template ANY ANY . {{
    rcode NXDOMAIN
  }}
}}
"""
    )


def _daemons(place: Place) -> dict[str, list[str]]:
    """Every daemon's command by its name, in the order of their start."""
    pki, kube = place.certificates, str(place.kube)

    def controller(name: str, *more: str) -> list[str]:
        kubeconfig = f"{place.data}/{name}.kubeconfig"
        reads = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return [kube, name, *(f"--{each}={kubeconfig}" for each in reads), "--leader-elect=false", *more]

    return {
        "etcd": [
            *(kube, "etcd", f"--data-dir={place.data}/etcd", "--unsafe-no-fsync"),
            *("--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379"),
            "--listen-peer-urls=http://127.0.0.1:2380",
        ],
        "kube-apiserver": [
            *(kube, "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379"),
            *("--bind-address=0.0.0.0", f"--advertise-address={place.node}"),
            *(f"--service-cluster-ip-range={place.services}", "--allow-privileged=true"),
            *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
            *(
                f"--tls-cert-file={pki}/kube-apiserver.crt",
                f"--tls-private-key-file={pki}/kube-apiserver.key",
            ),
            *(f"--client-ca-file={pki}/ca.crt", "--service-account-issuer=https://kubernetes.default.svc"),
            f"--service-account-key-file={pki}/accounts.key",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/admin.crt",
            f"--kubelet-client-key={pki}/admin.key",
            # Aggregation: Kueue serves an API through this one.
            f"--requestheader-client-ca-file={pki}/front-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={pki}/front.crt",
            f"--proxy-client-key-file={pki}/front.key",
        ],
        "containerd": [f"{place.bin}/containerd", "--config", f"{place.data}/containerd.toml"],
        "kube-controller-manager": controller(
            "kube-controller-manager",
            f"--service-account-private-key-file={pki}/accounts.key",
            f"--root-ca-file={pki}/ca.crt",
            "--use-service-account-credentials=true",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
        ),
        "kube-scheduler": controller("kube-scheduler"),
        "kubelet": [
            *(kube, "kubelet", f"--config={place.data}/kubelet.json"),
            *(f"--kubeconfig={place.data}/kubelet.kubeconfig", f"--hostname-override={NAME}"),
            f"--node-ip={place.node}",
        ],
        "kube-proxy": [kube, "kube-proxy", f"--config={place.data}/kube-proxy.json"],
        "coredns": [kube, "coredns", "-conf", f"{place.data}/Corefile"],
    }


def _api_is_ready() -> bool:
    try:
        context = ssl._create_unverified_context()
        with urllib.request.urlopen("https://127.0.0.1:6443/readyz", context=context, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _supervise(place: Place, owner: int | None) -> None:
    """Keep every daemon that is not held running, as systemd would, until the pipe of the owner is closed."""
    commands = _daemons(place)
    first = ("etcd", "kube-apiserver", "containerd")
    api_was_ready = False
    running: dict[int, str] = {}
    not_before: dict[str, float] = {}
    environment = {
        **os.environ,
        "PATH": f"{place.bin}:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin",
    }
    while True:
        api_was_ready = api_was_ready or _api_is_ready()
        for name, command in commands.items():
            if name in running.values() or (place.held / name).exists():
                continue
            if time.monotonic() < not_before.get(name, 0.0) or not (api_was_ready or name in first):
                continue
            with (place.logs / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )
            running[process.pid] = name
            not_before[name] = time.monotonic() + _RESTART_SECONDS
        if owner is None:
            time.sleep(0.1)
        elif select.select([owner], [], [], 0.1)[0]:
            return
        while True:
            # Process 1 is the parent of every orphan: shims, and what a container leaves.
            try:
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if ended == 0:
                break
            running.pop(ended, None)


def main(place: Place, owner: int | None) -> None:
    for directory in (place.logs, place.held, place.run):
        directory.mkdir(parents=True, exist_ok=True)
    _mount(place)
    _network(place)
    _cgroup(place)
    _certificates(place)
    _configure(place)
    _supervise(place, owner)


if __name__ == "__main__":
    main(Place(Path(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3]) if len(sys.argv) > 3 else None)
