"""Hand-over of frames between processes: the ring beside iceoryx2, pyzmq, multiprocessing.Queue and Ray.

    python benchmarks/transport/ring.py [--quick] [--repeats N] [--sizes BYTES,…] [--peers A,B,…] [--out FILE]

What is measured, and how, is in `tracerl.runtime.bench`, which `tracerl bench ring` runs too. Peers that are
not installed are left out: `make bench-transport` installs them all in an environment of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from tracerl.api.errors import InputError
from tracerl.runtime.bench import Settings, bench_ring, render_bench

RESULTS = Path(__file__).parents[1] / "results/transport-ring-cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, one repeat, little data")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each way and size")
    parser.add_argument("--sizes", metavar="BYTES,…", help="frame sizes")
    parser.add_argument("--peers", metavar="A,B,…", help="peers; by default all that are installed")
    text = f"where the JSON goes; by default {RESULTS.name} of the results, with --quick nowhere"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    options = parser.parse_args()
    settings = Settings.quick() if options.quick else Settings.full()
    if options.repeats is not None:
        settings = dataclasses.replace(settings, repeats=options.repeats)
    if options.sizes is not None:
        sizes = tuple(int(text) for text in options.sizes.split(","))
        settings = dataclasses.replace(settings, frame_bytes=sizes)
    peers = None if options.peers is None else [name for name in options.peers.split(",") if name]
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)

    try:
        document = bench_ring(settings, peers, say=say)
    except InputError as error:
        raise SystemExit(str(error)) from None
    out = options.out or (None if options.quick else RESULTS)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=2) + "\n")
    print(render_bench(document))


if __name__ == "__main__":
    main()
