"""Packing and quantisation on one core, as rates of BF16 source and as ratios to copying it in the same run.

    python benchmarks/numerics/pack.py    # prints a table, writes benchmarks/results/numerics-cpu.json

Times are CPU seconds of one thread, the median of interleaved rounds, so a busy machine widens them little.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tracerl.numerics import (
    Guide,
    dequantize,
    fake_quantize,
    guided_fake_quantize,
    pack_bits,
    quantize,
    unpack_bits,
)

ROWS, ROUNDS = 4096, 15
RESULTS = Path(__file__).parents[1] / "results/numerics-cpu.json"


def measure(dim: int) -> dict[str, dict[str, float]]:
    """Rate and ratio of every operation on [ROWS, dim] BF16 values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, dim, generator=generator).bfloat16()
    rollout = quantize(x + 0.02 * torch.randn(ROWS, dim, generator=generator))
    guide = Guide.of(rollout, code_bits=1, scale_bits=3)
    operations: dict[str, Callable[[], object]] = {
        "copy": x.clone,
        "pack": lambda: (pack_bits(rollout.codes, 1), pack_bits(rollout.scales, 3)),
        "unpack": lambda: (unpack_bits(guide.codes, 1, dim), unpack_bits(guide.scales, 3, dim // 16)),
        "quantize": lambda: quantize(x),
        "dequantize": lambda: dequantize(rollout, torch.bfloat16),
        "fakeQuantize": lambda: fake_quantize(x),
        "guidedFakeQuantize": lambda: guided_fake_quantize(x, guide),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(ROUNDS):
        for name, operation in operations.items():
            start = time.process_time()
            operation()
            seconds[name].append(time.process_time() - start)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    size = x.numel() * x.element_size()
    return {
        name: {
            "bytesPerSecond": size / s,
            "nanosecondsPerValue": s / x.numel() * 1e9,
            "ratioToCopy": median["copy"] / s,
            "ratioToFakeQuantize": median["fakeQuantize"] / s,
        }
        for name, s in median.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    results = {str(dim): measure(dim) for dim in (96, 256, 2048)}
    for dim, operations in results.items():
        print(f"{ROWS} x {dim} BF16, one core")
        for name, r in operations.items():
            rate, cost = r["bytesPerSecond"] / 1e9, r["nanosecondsPerValue"]
            to_copy, to_fake = r["ratioToCopy"], r["ratioToFakeQuantize"]
            print(
                f"  {name:20s} {rate:7.2f} GB/s  {cost:6.2f} ns a value  {to_copy:6.3f} of copy"
                f"  {to_fake:6.3f} of fakeQuantize"
            )
    RESULTS.parent.mkdir(exist_ok=True)
    document = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    RESULTS.write_text(json.dumps({**document, "rows": ROWS, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
