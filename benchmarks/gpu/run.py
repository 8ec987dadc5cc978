"""What records and guided rounding cost on a GPU, in sections, each of which is kept when another fails.

    python benchmarks/gpu/run.py [SECTION ...] [--quick] [--out FILE]    # on a machine with an NVIDIA GPU

Sections: kernels (bandwidth beside a copy of the same bytes), decode (a step under a CUDA graph, with capture
and without), training (a whole step, with records and guided kernels and without). Those that FILE holds
already are not run again unless they are named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

RESULTS = Path(__file__).parents[1] / "results/gpu-h200.json"


def machine() -> dict[str, Any]:
    """Describe the GPU, with its clocks as they are now and what it reaches in a copy and a product."""
    import training
    import triton

    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)

    def fastest(work: Callable[[], object]) -> float:
        return min(training.seconds(work) for _ in range(10))

    copy, product = fastest(lambda: target.copy_(source)), fastest(lambda: matrix @ matrix)
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu"
    found = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2Bytes": properties.L2_cache_size,
        **dict(zip(asked.split(","), found.stdout.splitlines()[0].split(", "), strict=True)),
        "copyBytesPerSecond": 2 * source.numel() / copy,
        "matrixFlopsPerSecond": 2 * 8192**3 / product,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def measure_kernels(*, quick: bool) -> dict[str, Any]:
    """Quantising, packing and guided rounding at the memory's speed."""
    import kernels

    found: dict[str, Any] = kernels.measure(quick)
    return found


def measure_decode(*, quick: bool) -> dict[str, Any]:
    """Decoding under a CUDA graph, with capture and without."""
    import decode

    return {arm: decode.measure(arm, pairs=3 if quick else 20) for arm in decode.ARMS}


def measure_training(*, quick: bool) -> dict[str, Any]:
    """A whole training step, with records and guided kernels and without."""
    import training

    return {arm: training.measure(training.Size(), arm, pairs=3 if quick else 16) for arm in training.ARMS}


SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "kernels": measure_kernels,
    "decode": measure_decode,
    "training": measure_training,
}


def share(found: dict[str, float]) -> str:
    """A share with its interval, in percent."""
    return f"{found['mean']:.2%} (95 %: {found['low']:.2%} to {found['high']:.2%})"


def table(document: dict[str, Any]) -> str:
    """All that was measured, as text."""
    about = document["machine"]
    lines = [
        f"{about['gpu']}, driver {about['driver_version']}, torch {about['torch']}, triton {about['triton']}",
        f"copy {about['copyBytesPerSecond'] / 1e9:,.0f} GB/s, "
        f"BF16 product {about['matrixFlopsPerSecond'] / 1e12:.0f} TFLOP/s",
    ]
    if "kernels" in document:
        import kernels

        lines.append(kernels.table(document["kernels"]))
    for name in ("decode", "training"):
        for arm, found in document.get(name, {}).items():
            lines.append(
                f"{name:<9} {arm:<11} with {1e3 * found['secondsWith']:9.3f} ms, "
                f"without {1e3 * found['secondsWithout']:9.3f} ms, share {share(found['shareOfStep'])}"
            )
    return "\n".join(lines)


def kernels_markdown(found: dict[str, Any]) -> str:
    """The kernels of 64 MiB of values and more, as markdown."""
    rows = [row for row in found["sizes"] if row["bytes"] >= 64 * 2**20]
    heads = [f"{row['bytes'] // 2**20:,} MiB" for row in rows]
    lines = [
        f"| kernel | {' | '.join(heads)} | instructions a value |",
        "| --- |" + " --- |" * (len(rows) + 1),
    ]
    for name in rows[0]:
        if name == "bytes" or "movedBytes" not in rows[0][name]:
            continue
        cells = [
            f"{row[name]['movedBytes'] / row[name]['seconds'] / 1e12:.2f} TB/s"
            + (f", {row[name]['ratioToCopy']:.2f} of a copy" if "ratioToCopy" in row[name] else "")
            for row in rows
        ]
        counted = found["instructions"].get(name)
        lines.append(f"| {name} | {' | '.join(cells)} | {'' if counted is None else counted['perValue']} |")
    return "\n".join(lines)


def compiled_markdown(document: dict[str, Any]) -> str:
    """What compiled.py found of BF16 values under the default order, as markdown."""
    arches = document["kernels"]
    targets = [next(iter(rows.values()))["target"] for rows in arches.values()]
    lines = [
        "| kernel |" + "".join(f" instructions a value, {t} | registers, {t} |" for t in targets),
        "| --- |" + " --- |" * (2 * len(targets)),
    ]
    others = ("FourOverSix", "TorchAO", "ModelOpt", "CompressedTensors", "float16", "float32")
    for name in next(iter(arches.values())):
        if not name.endswith(others):
            found = [rows[name] for rows in arches.values()]
            cells = [f"{row['instructionsPerValue']} | {row['registers']}" for row in found]
            lines.append(f"| {name.removesuffix(', Reciprocal')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_markdown(document: dict[str, Any]) -> str:
    """Steps with and without records, as markdown."""
    lines = [
        "| step | records | bytes a token | with | without | share of the step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("decode", "training"):
        for found in document[name].values():
            method = found["method"]
            bits = f"{method['codeBits']} and {method['scaleBits']} bits, {method['layers']['policy']}"
            lines.append(
                f"| {name} | {bits} | {found['recordBytesPerToken']:,} | {1e3 * found['secondsWith']:.2f} ms "
                f"| {1e3 * found['secondsWithout']:.2f} ms | {share(found['shareOfStep'])} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Run sections."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it works")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.sections) - set(SECTIONS)):
        parser.error(f"{unknown[0]} is not a section; name some of {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu/run.py: PyTorch sees no GPU here; run it on a machine with an NVIDIA GPU")
    document = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    document["machine"] = machine()
    failed = []
    for name in arguments.sections or [name for name in SECTIONS if name not in document]:
        started = time.perf_counter()
        try:
            document[name] = SECTIONS[name](quick=arguments.quick)
        except Exception:  # noqa: BLE001  what the other sections find is worth keeping
            traceback.print_exc()
            failed.append(name)
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    if failed:
        sys.exit(f"benchmarks/gpu/run.py: {', '.join(failed)} failed; see above")


if __name__ == "__main__":
    main()
