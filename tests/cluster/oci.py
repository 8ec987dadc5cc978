"""Images from directories, straight into a cluster's containerd: no registry, no Docker.

A document says what an image is:

    {"name": "localhost/one:test",
     "config": {"User": "65532:65532", "Env": ["PATH=/usr/bin"], "Entrypoint": ["/usr/bin/one"]},
     "layers": [{"directory": "/path"}, {"directory": "/venv", "prefix": "/opt/venv", "linked": true}]}

`config` has OCI's own keys. A layer's files lie below `prefix` ("/"), without those of `exclude` (patterns of
tar). A linked layer is not copied: its files are hard-linked into containerd's snapshot, seconds instead of
minutes for an environment of several GB; nothing may write to them in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster import Cluster

_MARK = ".linked"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _fingerprint(directory: Path) -> str:
    """Changes when a file of the tree does: by path, size, time of change and inode, without reading any."""
    seen = hashlib.sha256()
    for root, directories, files in os.walk(directory):
        directories.sort()
        for name in sorted(files):
            path = Path(root, name)
            stat = path.lstat()
            seen.update(
                f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}\0{stat.st_mode}\n".encode()
            )
    return seen.hexdigest()


@contextlib.contextmanager
def _packed(layer: dict[str, Any], scratch: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    """The layer as a tar file: its digest, size and content; the same files give the same digest.

    Times are kept: compiled Python knows its source by them.
    """
    prefix = layer.get("prefix", "/").strip("/")
    command = ["tar", "-C", layer["directory"], "--sort=name", "--numeric-owner"]
    command += ["--owner=0", "--group=0", *(f"--exclude={each}" for each in layer.get("exclude", []))]
    if prefix:
        # Of names and hard links, not of what symbolic links point at.
        command += [f"--transform=flags=rh;s,^\\.,./{prefix},"]
    with tempfile.TemporaryFile(dir=scratch) as content:
        subprocess.run([*command, "-cf", "-", "."], stdout=content, check=True)
        content.seek(0)
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        size = content.tell()
        content.seek(0)
        yield f"sha256:{digest}", size, content


def _archive(
    out: IO[bytes], name: str, config: dict[str, Any], layers: list[tuple[str, int, IO[bytes]]]
) -> None:
    """Write an image in OCI's layout as a tar stream."""
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    kind = {"architecture": architecture, "os": "linux"}
    image = {
        **kind,
        "config": {"WorkingDir": "/", "Env": [_PATH], **config},
        "rootfs": {"type": "layers", "diff_ids": [digest for digest, _, _ in layers]},
    }
    described = json.dumps(image).encode()
    media = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{media}.manifest.v1+json",
        "config": {
            "mediaType": f"{media}.config.v1+json",
            "digest": _digest(described),
            "size": len(described),
        },
        "layers": [
            {"mediaType": f"{media}.layer.v1.tar", "digest": digest, "size": size}
            for digest, size, _ in layers
        ],
    }
    listed = json.dumps(manifest).encode()
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": manifest["mediaType"],
                "digest": _digest(listed),
                "size": len(listed),
                "platform": kind,
                "annotations": {"io.containerd.image.name": name},
            }
        ],
    }
    with tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20) as archive:

        def put(path: str, size: int, content: IO[bytes]) -> None:
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = size, 0o644
            archive.addfile(entry, content)

        small = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode()}
        for data in (listed, described):
            small["blobs/sha256/" + _digest(data).removeprefix("sha256:")] = data
        for path, data in small.items():
            put(path, len(data), io.BytesIO(data))
        for digest, (size, content) in {digest: (size, content) for digest, size, content in layers}.items():
            put("blobs/sha256/" + digest.removeprefix("sha256:"), size, content)


def _link(cluster: Cluster, mark: str, directory: Path, prefix: str) -> None:
    """Fill the snapshots that hold the mark with links to the directory's files: one for each layer below."""
    snapshots = cluster.place.containerd / "io.containerd.snapshotter.v1.overlayfs/snapshots"
    for path in snapshots.glob(f"*/fs/{prefix}/{_MARK}"):
        if path.read_text(encoding="utf-8") != mark:
            continue
        target = path.parent
        # Beside the image's files, so it goes with the snapshot; written last, so that half a tree is none.
        whole = target.parents[len(Path(prefix).parts)] / "linked"
        if whole.exists():
            continue
        done = subprocess.run(
            ["cp", "--archive", "--link", "--no-clobber", f"{directory}/.", target],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{directory} cannot be linked into an image: put {cluster.place.cache} on its file system "
                f"(TRACERL_CLUSTER_CACHE): {done.stderr[-300:]}"
            )
        whole.touch()


def load_image(cluster: Cluster, document: dict[str, Any]) -> bool:
    """Import the image that the document says; whether it was not there already."""
    name, config = document["name"], document.get("config", {})
    layers = [{**layer, "directory": str(layer["directory"])} for layer in document["layers"]]
    for layer in layers:
        layer["fingerprint"] = _fingerprint(Path(layer["directory"]))
    wanted = json.dumps([name, config, layers], sort_keys=True)
    noted = cluster.place.data / "images" / (hashlib.sha256(name.encode()).hexdigest()[:16] + ".json")
    if noted.exists() and noted.read_text() == wanted and name in cluster.ctr("images", "ls", "-q").split():
        return False
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.unlink(missing_ok=True)
    links: list[tuple[str, Path, str]] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=noted.parent)))
        packed = []
        for number, layer in enumerate(layers):
            if layer.get("linked"):
                prefix = layer["prefix"].strip("/")
                links.append((layer["fingerprint"], Path(layer["directory"]), prefix))
                only_mark = scratch / str(number)
                (only_mark / prefix).mkdir(parents=True)
                (only_mark / prefix / _MARK).write_text(layer["fingerprint"])
                # The same mark has to be the same layer, or one of two snapshots would stay empty.
                for each in (only_mark, *only_mark.rglob("*")):
                    os.utime(each, (0, 0))
                packed.append(stack.enter_context(_packed({"directory": only_mark}, scratch)))
            else:
                packed.append(stack.enter_context(_packed(layer, scratch)))
        # The second name that CRI gives an image keeps the former one's layers.
        before = cluster.images().get(name)
        with cluster.start_ctr("images", "import", "--local", "--discard-unpacked-layers", "-") as importing:
            assert importing.stdin is not None
            _archive(importing.stdin, name, config, packed)
            importing.stdin.close()
            if importing.wait():
                assert importing.stderr is not None
                raise RuntimeError(f"import of {name}: {importing.stderr.read().decode()}")
    for mark, directory, prefix in links:
        _link(cluster, mark, directory, prefix)
    now = cluster.images()
    if before is not None and before != now[name]:
        stale = [each for each, target in now.items() if target == before and each.startswith("sha256:")]
        if stale:
            cluster.ctr("images", "rm", *stale)
    noted.write_text(wanted)
    return True
