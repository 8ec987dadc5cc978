"""A real etcd and kube-apiserver on free ports of this machine, and the few requests that the tests make."""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from cluster import here

KUBE = here().kube
_START_SECONDS = 60.0
_JOBS = "/apis/tracerl.dev/v1alpha1/namespaces/default/tracerljobs"


class RefusedError(Exception):
    """The API server's answer to what it did not accept."""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class ApiServer:
    """Both processes, with everything they write in one directory; a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.kubeconfig = directory / "kubeconfig"
        """How other programs find the server, as its administrator."""
        self._token = secrets.token_hex(16)
        self._client, self._peer, self._port = _free_ports(3)
        # The certificate is made by the server at its start, for this machine alone.
        self._tls = ssl._create_unverified_context()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        """Start both and wait until the API server answers."""
        key = self._directory / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self._directory / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        client, peer = f"http://127.0.0.1:{self._client}", f"http://127.0.0.1:{self._peer}"
        self._start(
            "etcd",
            f"--data-dir={self._directory}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._server = (
            "kube-apiserver",
            f"--etcd-servers={client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self._directory}/certificates",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={self._directory}/tokens.csv",
            "--authorization-mode=RBAC",
            # As on OpenShift: who sets owners needs the rights to delete the thing and to keep the owner.
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
            "--service-cluster-ip-range=10.96.0.0/16",
        )
        self.start()
        cluster = {"server": f"https://127.0.0.1:{self._port}", "insecure-skip-tls-verify": True}
        content = {
            "clusters": [{"name": "rig", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": self._token}}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": "admin"}}],
            "current-context": "rig",
        }
        self.kubeconfig.write_text(json.dumps(content))
        self.wait()

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait()

    def stop(self) -> None:
        """End the API server; etcd, and with it all objects, stay."""
        server = self._processes.pop()
        server.terminate()
        server.wait()

    def start(self) -> None:
        """Start the API server, which takes some seconds."""
        self._start(*self._server)

    def wait(self) -> None:
        """Wait until the API server has started."""
        self._wait(lambda: self.request("GET", "/readyz", raw=True) == "ok", "the API server")
        self._wait(lambda: bool(self.request("GET", "/api/v1/namespaces/default")), "its namespace default")

    def _start(self, name: str, *arguments: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen([KUBE, name, *arguments], stdout=log, stderr=log))

    def _wait(self, ready: Any, what: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                if ready():
                    return
            except (OSError, RefusedError) as error:
                last = error
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"{what} ended; see {self._directory}/*.log")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} is not there after {_START_SECONDS} s: {last}")
            time.sleep(0.1)

    def request(
        self, method: str, path: str, body: Any = None, *, kind: str = "json", raw: bool = False
    ) -> Any:
        """Ask; the answer as text with `raw`, else parsed. RefusedError with the server's message."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": f"application/{kind}"},
        )
        try:
            with urllib.request.urlopen(request, context=self._tls) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            raise RefusedError(json.loads(text)["message"] if text.startswith("{") else text) from None
        return text if raw else json.loads(text)

    def open(self, path: str) -> Any:
        """Begin to read what has no end, such as a watch."""
        url, headers = f"https://127.0.0.1:{self._port}{path}", {"Authorization": f"Bearer {self._token}"}
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=self._tls)

    def define(self, definition: dict[str, Any]) -> None:
        """Create a CustomResourceDefinition and wait until its objects can be made."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.request("POST", path, definition)
        name, spec = definition["metadata"]["name"], definition["spec"]
        stored = next(version["name"] for version in spec["versions"] if version["storage"])
        objects = f"/apis/{spec['group']}/{stored}/{spec['names']['plural']}"

        def established() -> bool:
            conditions = self.request("GET", f"{path}/{name}").get("status", {}).get("conditions") or []
            return {"Established": "True"}.items() <= {c["type"]: c["status"] for c in conditions}.items()

        self._wait(established, f"the resource {name}")
        self._wait(lambda: self.request("GET", objects)["items"] == [], f"the list of {name}")

    def create(self, job: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Create a job, refusing fields that are not known, as kubectl does."""
        return self.request("POST", f"{_JOBS}?fieldValidation=Strict{'&dryRun=All' * dry_run}", job)

    def patch(self, name: str, change: dict[str, Any], *, dry_run: bool) -> dict[str, Any]:
        """Change a job by a merge patch."""
        return self.request(
            "PATCH",
            f"{_JOBS}/{name}?fieldValidation=Strict{'&dryRun=All' * dry_run}",
            change,
            kind="merge-patch+json",
        )

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl with `given` as its standard input; RuntimeError with what it wrote when it fails."""
        result = subprocess.run(
            [
                KUBE,
                "kubectl",
                f"--kubeconfig={self.kubeconfig}",
                f"--cache-dir={self._directory}/kubectl",
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
            input=given,
            env={"HOME": str(self._directory)},
        )
        if result.returncode:
            raise RuntimeError(result.stderr)
        return result.stdout
