"""The ring's benchmark: what its document says, and that it leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tracerl.api.errors import InputError
from tracerl.cli import main
from tracerl.runtime import bench
from tracerl.runtime.bench import Run, Settings, bench_ring, installed_peers, render_bench

KEYS = {"bytesPerSecond", "ratioToCopyAndHash", "ratios", "cpuSecondsPerGigabyte", "latencySeconds"}
TINY = Settings((4096,), repeats=1, bytes_a_run=2**18, most_frames=64, latencies=10)


def left_behind() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("tracerl-bench-*")}


def test_the_document_has_the_ring_and_its_peers() -> None:
    before, said = left_behind(), list[str]()
    document = json.loads(json.dumps(bench_ring(TINY, ["multiprocessing.Queue"], say=said.append)))
    (result,) = document["results"]
    assert result["frameBytes"] == 4096
    assert result.keys() >= KEYS
    assert result["peers"].keys() == {"multiprocessing.Queue"}
    for figures in (result, result["peers"]["multiprocessing.Queue"], result["copyAndHash"]):
        assert figures["bytesPerSecond"] > 0
        assert figures["cpuSecondsPerGigabyte"] > 0
        assert figures["latencySeconds"]["p50"] > 0
        # Ten samples say nothing about one in a hundred.
        assert figures["latencySeconds"]["p99"] is None
    assert result["copyAndHash"]["ratioToCopyAndHash"] == 1
    assert len(said) == 2
    assert left_behind() <= before
    assert "multiprocessing.Queue" in render_bench(document)


def test_figures_are_medians_of_neighbours() -> None:
    pairs = [
        (Run(speed, cpu, (0.5, 1.5)), Run(base, 0.1, ()))
        for speed, cpu, base in ((1e9, 1.0, 2e9), (3e9, 3.0, 3e9), (2e9, 2.0, 20e9))
    ]
    figures = bench._figures(pairs)
    assert figures["ratios"] == [0.5, 1.0, 0.1]
    assert figures["ratioToCopyAndHash"] == 0.5
    assert (figures["bytesPerSecond"], figures["cpuSecondsPerGigabyte"]) == (2e9, 2.0)
    assert figures["latencySeconds"] == {"p50": 0.5, "p99": None, "p999": None, "samples": 6}


@pytest.mark.parametrize(
    ("count", "share", "rank"), [(1000, 0.999, 999), (999, 0.999, None), (100, 0.99, 99)]
)
def test_percentiles_are_nearest_ranks(count: int, share: float, rank: int | None) -> None:
    assert bench._percentile([float(n) for n in range(1, count + 1)], share) == rank


def test_sizes_that_shared_memory_does_not_hold_are_left_out() -> None:
    document = bench_ring(Settings((2**50,), repeats=1), [])
    assert document["results"] == []
    assert "free of the" in document["leftOut"][0]["why"]


def test_what_is_not_installed_cannot_be_measured() -> None:
    with pytest.raises(InputError, match=r"'pigeon' cannot be measured here; choose from .*Queue"):
        bench_ring(TINY, ["pigeon"])
    assert "multiprocessing.Queue" in installed_peers()
    assert main(["bench", "ring", "--peers", "pigeon"]) == 2
