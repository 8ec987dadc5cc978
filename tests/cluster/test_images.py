"""The images, as a pod of the restricted standard sees them: user 65532, nothing writable but /tmp."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live import Namespace
from oci import load_image

from cluster import Cluster

ROOT = Path(__file__).parents[2]
TARGETS = [
    pytest.param("operator", marks=pytest.mark.ci),
    pytest.param("canary", marks=pytest.mark.ci),
    pytest.param("rollout", marks=pytest.mark.full),
    pytest.param("trainer", marks=pytest.mark.full),
]
MODULES = {
    "operator": ["tracerl_operator.__main__", "tracerl_operator.shell", "kopf", "kubernetes"],
    "rollout": ["tracerl.runtime.rollout_main", "tracerl.runtime.store_main", "tracerl.cli", "s3fs"],
    "trainer": ["tracerl.runtime.trainer_main", "tracerl.cli", "s3fs", "reasoning_gym"],
}
MODULES["canary"] = [*MODULES["rollout"], *MODULES["trainer"]]
MODULES["rollout"].append("tracerl.engines.sglang.server")
MODULES["trainer"].append("tracerl.engines.megatron.trainer")
ABSENT = {
    "operator": ["torch", "numpy", "s3fs", "reasoning_gym"],
    "rollout": ["kopf", "reasoning_gym", "pytest", "megatron"],
    "trainer": ["kopf", "pytest", "sglang"],
    "canary": ["kopf", "pytest", "sglang", "megatron"],
}
LOOK = r"""
import getpass, importlib, importlib.util, json, os, shutil, stat, subprocess, sys

modules, absent = json.loads(sys.argv[1]), json.loads(sys.argv[2])
root = os.lstat("/").st_dev
found = {"setuid": [], "open": [], "ours": [], "caches": [], "unreadable": [], "size": 0}
for place, directories, files in os.walk("/"):
    directories[:] = [name for name in directories if os.lstat(os.path.join(place, name)).st_dev == root]
    for name in directories + files:
        path = os.path.join(place, name)
        is_ = os.lstat(path)
        if stat.S_ISLNK(is_.st_mode) or is_.st_dev != root:
            continue
        found["size"] += is_.st_blocks * 512
        if stat.S_ISREG(is_.st_mode) and is_.st_mode & 0o6000:
            found["setuid"].append(path)
        if is_.st_mode & 0o002 and not (stat.S_ISDIR(is_.st_mode) and is_.st_mode & stat.S_ISVTX):
            found["open"].append(path)
        if is_.st_uid == os.getuid() or is_.st_gid == os.getgid():
            found["ours"].append(path)
        if path.startswith(("/opt/tracerl/", "/usr/share/tracerl/")) and not is_.st_mode & 0o004:
            found["unreadable"].append(path)
        if name in ("pip", ".cache") and stat.S_ISDIR(is_.st_mode):
            found["caches"].append(path)
found["programs"] = [name for name in ("cc", "gcc", "ld", "pip", "pip3", "uv") if shutil.which(name)]
found["user"] = [os.getuid(), os.getgid(), getpass.getuser()]
for name in modules:
    importlib.import_module(name)
found["present"] = [name for name in absent if importlib.util.find_spec(name)]
specs = [module.__spec__ for module in list(sys.modules.values()) if getattr(module, "__spec__", None)]
found["compiled at start"] = [
    spec.origin for spec in specs if spec.cached and spec.has_location and not os.path.exists(spec.cached)
]
try:
    open("/opt/tracerl/written", "w")
except OSError as error:
    found["refused"] = error.strerror
found["version"] = subprocess.run(["tracerl", "--version"], capture_output=True, text=True).stdout
print(json.dumps(found))
"""


def pod(name: str, target: str, **container: Any) -> dict[str, Any]:
    main = {
        "name": "main",
        "image": f"localhost/tracerl-{target}:test",
        "imagePullPolicy": "Never",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **container,
    }
    # No runAsUser: the image's own is number 65532, which runAsNonRoot can judge.
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "containers": [main],
        },
    }


def outcome(namespace: Namespace, name: str) -> str:
    """What a pod wrote, when it has ended well."""
    ended = ("Succeeded", "Failed")
    namespace.wait_for(
        lambda: namespace.get("pod", name)["status"].get("phase") in ended, f"the end of {name}", 180
    )
    logs = namespace.logs(name, "main")
    assert namespace.get("pod", name)["status"]["phase"] == "Succeeded", logs
    return logs


@pytest.fixture(scope="session")
def image(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A target, put together and known to the cluster."""
    target: str = request.param
    out = cluster.place.cache / "images/out"
    words = [sys.executable, ROOT / "images/assemble.py", "--out", out, target]
    environment = {**os.environ, "TRACERL_CLUSTER_CACHE": str(cluster.place.cache)}
    subprocess.run(words, check=True, env=environment)
    load_image(cluster, json.loads((out / f"{target}.json").read_text()))
    return target


@pytest.mark.parametrize("image", TARGETS, indirect=True)
def test_nothing_can_be_changed_and_all_that_is_needed_is_there(
    image: str, namespace: Namespace, record_property: pytest.RecordProperty
) -> None:
    words = ["python", "-P", "-c", LOOK, json.dumps(MODULES[image]), json.dumps(ABSENT[image])]
    namespace.apply(pod("look", image, command=words))
    found = json.loads(outcome(namespace, "look").splitlines()[-1])
    size = round(found.pop("size") / 2**20)
    record_property("mebibytes", size)
    assert found == {
        "setuid": [],
        "open": [],
        "ours": [],
        "caches": [],
        "unreadable": [],
        "programs": [],
        "user": [65532, 65532, "tracerl"],
        "present": [],
        "compiled at start": [],
        "refused": "Read-only file system",
        "version": "tracerl 0.1.0\n",
    }


# In CI the operator that is installed and the canary's `validate` below start them, too.
@pytest.mark.full
@pytest.mark.parametrize("image", ["operator", "canary", "rollout", "trainer"], indirect=True)
def test_the_command_of_the_image_starts(image: str, namespace: Namespace) -> None:
    namespace.apply(pod("help", image, args=["--help"]))
    assert ("--trainer-image" if image == "operator" else "validate") in outcome(namespace, "help")


@pytest.mark.ci
@pytest.mark.parametrize("image", ["canary"], indirect=True)
def test_the_canary_holds_examples_that_are_valid(image: str, namespace: Namespace) -> None:
    namespace.apply(pod("validate", image, args=["validate", "/usr/share/tracerl/examples/canary.yaml"]))
    assert "valid" in outcome(namespace, "validate")
