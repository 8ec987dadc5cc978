"""The numerics' kernels on a CUDA GPU: their bits against the reference's, their time against a copy's.

    python benchmarks/gpu/kernels.py --verify     # every function against the CPU reference, >= 100 M values
    python benchmarks/gpu/kernels.py [--quick]    # prints a table and, as its last line, JSON
    python benchmarks/gpu/kernels.py --tune       # how launch.py should cut the work of the kernels here

Times are those of CUDA graphs of many launches that rotate among buffers larger together than the L2 cache.
A kernel's bytes are what it must read and write once; the copy beside it moves as many.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from hard_blocks import hard_blocks
from torch import Tensor

from tracerl.numerics import (
    NVFP4,
    Guide,
    NonFiniteError,
    NonFiniteFlags,
    Order,
    TensorScale,
    dequantize,
    fake_quantize,
    guided_fake_quantize,
    guided_quantize,
    pack_bits,
    quantize,
    quantize_dequantize,
    quantize_into_rows,
    rebuild_scales,
    unpack_bits,
)
from tracerl.numerics.blocks import nearest
from tracerl.numerics.guidance import guided

DIM = 2048
"""Values a row: the hidden width of Qwen3-30B-A3B."""
MIB = 1 << 20
SIZES = [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]
"""Bytes of BF16 source."""
LARGE = 64 * MIB
"""From here on a kernel is measured by the memory."""
FOOTPRINT = 512 * MIB
"""Bytes of source that launches rotate among: several times the L2 cache of an H200."""
SAMPLES = 21
VALUES = 160 * MIB
"""How many are compared: more than 100 million of 16 bits."""


# -- time -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One set of buffers of a size, and what is done with it."""

    x: Tensor
    out: Tensor
    rows: Tensor
    zero_bits: Tensor
    guides: dict[str, Guide]

    @classmethod
    def of(cls, size: int, seed: int) -> Case:
        generator = torch.Generator("cuda").manual_seed(seed)
        n = max(1, size // (2 * DIM))
        x = torch.randn(n, DIM, generator=generator, device="cuda")
        x.mul_(torch.randn(n, 1, generator=generator, device="cuda").exp_())
        y = (x * (1 + 0.01 * torch.randn(n, DIM, generator=generator, device="cuda"))).bfloat16()
        x = x.bfloat16()
        rollout = quantize(y)
        guides = {"1bit": Guide.of(rollout, 1, 3), "Whole": Guide.of(rollout, 4, 8)}
        present = torch.rand(n, generator=generator, device="cuda") < 0.99
        guides = {name: replace(guide, present=present, zero_blocks=None) for name, guide in guides.items()}
        rows = torch.empty(n, DIM // 2 + DIM // 16, dtype=torch.uint8, device="cuda")
        zero_bits = torch.empty(n, DIM // 128, dtype=torch.uint8, device="cuda")
        return cls(x, torch.empty_like(x), rows, zero_bits, guides)


VALUE = 2.0
PACKED_1BIT, PACKED_WHOLE = 1 / 8 + 3 / 128, 1 / 2 + 1 / 16
ZERO_BITS = 1 / 128
KERNELS: dict[str, tuple[Callable[[Case], object], float]] = {
    "rtnQuantizePack": (
        lambda c: quantize_into_rows(c.x, c.rows, 0, code_bits=1, scale_bits=3, zero_bits=c.zero_bits),
        VALUE + PACKED_1BIT + ZERO_BITS,
    ),
    "rtnQuantizePackWhole": (
        lambda c: quantize_into_rows(c.x, c.rows, 0, code_bits=4, scale_bits=8, zero_bits=c.zero_bits),
        VALUE + PACKED_WHOLE + ZERO_BITS,
    ),
    "rtnFakeQuantize": (lambda c: fake_quantize(c.x), 2 * VALUE),
    "capture": (
        lambda c: quantize_into_rows(
            c.x, c.rows, 0, code_bits=1, scale_bits=3, zero_bits=c.zero_bits, values=c.out
        ),
        2 * VALUE + PACKED_1BIT + ZERO_BITS,
    ),
    "guidedFakeQuantize1bit": (
        lambda c: guided_fake_quantize(c.x, c.guides["1bit"]),
        2 * VALUE + PACKED_1BIT,
    ),
    "guidedFakeQuantizeWhole": (
        lambda c: guided_fake_quantize(c.x, c.guides["Whole"]),
        2 * VALUE + PACKED_WHOLE,
    ),
}
"""By name: the call, and the bytes that it moves a value."""
REFERENCES: dict[str, Callable[[Case], object]] = {
    "torchRtnFakeQuantize": lambda c: nearest(
        c.x, NVFP4, TensorScale.one(), Order.RECIPROCAL, ""
    ).to_values(),
    "torchGuided": lambda c: guided(
        c.x, c.guides["1bit"], NVFP4, order=Order.RECIPROCAL, band=None, site=""
    ).to_values(),
}
"""The torch functions on the same device, but for unpacking and rebuilding scales."""


def seconds(function: Callable[[Case], object], cases: list[Case], launches: int) -> float:
    """Median time of one call, by CUDA events around replays of a graph of many."""
    flags = NonFiniteFlags("cuda")
    with flags, torch.cuda.stream(torch.cuda.Stream()):
        function(cases[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                function(cases[i % len(cases)])
    graph.replay()
    flags.check()
    return statistics.median(elapsed(graph.replay) for _ in range(SAMPLES)) / launches


def elapsed(function: Callable[[], object]) -> float:
    """Seconds between two events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_seconds(moved: float, launches: int) -> float:
    """Time of a device copy that reads and writes as many bytes."""
    size = int(moved / 2) & -512
    buffers = max(1, min(256, FOOTPRINT // size))
    pairs = [torch.empty(2, size, dtype=torch.uint8, device="cuda").random_() for _ in range(buffers)]
    graph = torch.cuda.CUDAGraph()
    pairs[0][1].copy_(pairs[0][0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(launches):
            pair = pairs[i % len(pairs)]
            pair[1].copy_(pair[0])
    graph.replay()
    return statistics.median(elapsed(graph.replay) for _ in range(SAMPLES)) / launches


def measure(quick: bool = False) -> dict[str, object]:
    """Time every kernel at every size; `quick` takes two sizes."""
    sizes: list[dict[str, object]] = []
    for size in [MIB, LARGE] if quick else SIZES:
        count = max(2, min(256, FOOTPRINT // size))
        cases = [Case.of(size, seed) for seed in range(count)]
        launches = max(4, min(64, FOOTPRINT // size))
        values = cases[0].x.numel()
        copied = copy_seconds(2 * VALUE * values, launches)
        moved = int(2 * VALUE * values)
        row: dict[str, object] = {
            "bytes": size,
            "copy": {"seconds": copied, "movedBytes": moved, "bytesPerSecond": moved / copied},
        }
        for name, (function, per_value) in KERNELS.items():
            taken, moved = seconds(function, cases, launches), int(per_value * values)
            row[name] = {
                "seconds": taken,
                "movedBytes": moved,
                "bytesPerSecond": moved / taken,
                "ratioToCopy": copy_seconds(moved, launches) / taken,
            }
        for name, function in REFERENCES.items():
            if size <= LARGE:
                function(cases[0])
                taken = statistics.median(elapsed(partial(function, cases[i % count])) for i in range(5))
                row[name] = {"seconds": taken}
        sizes.append(row)
        del cases
        torch.cuda.empty_cache()
    large = [row for row in sizes if row["bytes"] >= LARGE]  # type: ignore[operator]

    def worst(name: str, key: str = "ratioToCopy") -> float:
        return min(row[name][key] for row in large)  # type: ignore[index]

    ratio = max(
        row["guidedFakeQuantize1bit"]["seconds"] / row["rtnFakeQuantize"]["seconds"]  # type: ignore[index]
        for row in large
    )
    return {
        "sizes": sizes,
        "instructions": instructions(),
        "rtnQuantizePack": {"ratioToCopy": worst("rtnQuantizePack")},
        "guidedQuantize": {"ratioToCopy": worst("guidedFakeQuantize1bit"), "ratioToRTN": ratio},
    }


def table(result: dict[str, object]) -> str:
    """Show what `measure` gives as text."""
    lines = [f"{'MiB':>6} {'kernel':26} {'us':>9} {'TB/s':>6} {'of copy':>8}"]
    for row in result["sizes"]:  # type: ignore[attr-defined]
        for name, cell in row.items():
            if name != "bytes":
                rate = f"{cell['bytesPerSecond'] / 1e12:6.2f}" if "bytesPerSecond" in cell else ""
                ratio = f"{cell['ratioToCopy']:8.3f}" if "ratioToCopy" in cell else ""
                lines.append(
                    f"{row['bytes'] / MIB:6.0f} {name:26} {cell['seconds'] * 1e6:9.1f} {rate} {ratio}"
                )
    for name, found in result["instructions"].items():  # type: ignore[attr-defined]
        lines.append(f"{name:33} {found}")
    lines.append(f"rtnQuantizePack {result['rtnQuantizePack']}, guidedQuantize {result['guidedQuantize']}")
    return "\n".join(lines)


def instructions() -> dict[str, dict[str, float]]:
    """Instructions that a thread executes a value, counted in the machine code of the kernels that ran."""
    from tracerl.numerics.triton import kernels, launch

    case = Case.of(MIB, 0)
    found = {}
    for name, (function, _) in KERNELS.items():
        kernel, cut = kernels.quantize_kernel, launch.NEAREST
        if name == "rtnQuantizePack":
            kernel, cut = kernels.parity_kernel, launch.PARITIES
        if name.startswith("guided"):
            kernel, cut = kernels.guided_kernel, launch.GUIDED
        with compiled(kernel) as caught:
            function(case)
        code = caught[-1]
        listing = inspect(code.asm["cubin"], "nvdisasm", "-c")
        found[name] = {
            "perValue": round(executed(listing) / (cut.blocks * 16 / (32 * cut.warps)), 2),
            "registers": code.n_regs,
            "spills": code.n_spills,
        }
    return found


class compiled:  # noqa: N801
    """Catches what a kernel's launches run."""

    def __init__(self, kernel: object) -> None:
        self._kernel, self.found = kernel, []

    def __enter__(self) -> list:
        self._run = self._kernel.run

        def run(*args: object, **kwargs: object) -> object:
            self.found.append(self._run(*args, **kwargs))
            return self.found[-1]

        self._kernel.run = run
        return self.found

    def __exit__(self, *_: object) -> None:
        self._kernel.run = self._run


def inspect(cubin: bytes, tool: str, *options: str) -> str:
    """Give what one of the tools that come with Triton says of a kernel's machine code."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout


def executed(listing: str) -> int:
    """Count instructions of a tile, as nvdisasm lists them: of the loop, or up to the last exit.

    Behind that are the slow paths of divisions, and padding.
    """
    labels: dict[str, int] = {}
    count = exits = loop = 0
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            if "EXIT" in instruction[1]:
                exits = count
            back = re.search(r"BRA.*\((\.L_x_\d+)\)", instruction[1])
            # What ends a listing branches to itself.
            if back and (length := count - labels.get(back[1], count)) > 1:
                loop = max(loop, length)
    return loop or exits


# -- bits -------------------------------------------------------------------------------------------------


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    """AssertionError where bits differ."""
    found = found.cpu()
    if found.dtype.is_floating_point:
        pattern = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
        found, wanted = found.view(pattern), wanted.view(pattern)
    differ = found != wanted
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} differ"


def verify_piece(seed: int, values: int, k: int, dtype: torch.dtype, order: Order) -> int:
    """Compare every function on one piece, with a record width, a scale and a band by the seed."""
    generator = torch.Generator().manual_seed(seed)
    n = values // k
    what = f"{dtype} {order} K {k} seed {seed}"
    x = hard_blocks(generator, n, k, dtype)
    scale = TensorScale.one()
    if seed % 3:
        convention = ("encode", "decode", "amax")[seed // 3 % 3]
        value = torch.rand(n, 1, generator=generator) * 4 + 0.1
        scale = TensorScale(value if seed % 3 == 1 else value[0, 0], convention)
    on_device = TensorScale(scale.value.cuda() if scale.value.ndim else scale.value, scale.convention)
    device = x.cuda()
    if seed % 2:  # rows that are not together
        device = torch.nn.functional.pad(device, (16, 32))[:, 16:-32]
    q, out = quantize_dequantize(x, tensor_scale=scale, order=order)
    found, found_out = quantize_dequantize(device, tensor_scale=on_device, order=order)
    same(found.codes, q.codes, f"codes, {what}")
    same(found.scales, q.scales, f"scales, {what}")
    same(found_out, out, f"values, {what}")
    same(fake_quantize(device, tensor_scale=on_device, order=order) + 0.0, out + 0.0, f"fake, {what}")

    bits, scale_bits, band = list(product((0, 1, 2, 4), (0, 1, 2, 3, 8), (None, 0.125)))[seed % 40]
    near = x.float() * (1 + 0.03 * torch.randn(n, k, generator=generator))
    y = near.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    guide = replace(Guide.of(q, bits, scale_bits), present=torch.rand(n, generator=generator) < 0.9)
    if seed % 5 == 0:  # of something else altogether
        garbage = torch.randint(0, 256, guide.codes.shape, generator=generator, dtype=torch.uint8)
        guide = replace(guide, codes=garbage, zero_blocks=None)
    there = replace(
        guide,
        codes=guide.codes.cuda(),
        scales=guide.scales.cuda(),
        tensor_scale=on_device,
        zero_blocks=None if guide.zero_blocks is None else guide.zero_blocks.cuda(),
        present=guide.present.cuda(),
    )
    what = f"{what} bits {bits} {scale_bits} band {band}"
    wanted = guided_quantize(y, guide, order=order, band=band)
    result = guided_quantize(y.cuda(), there, order=order, band=band)
    same(result.scales, wanted.scales, f"guided scales, {what}")
    same(result.codes, wanted.codes, f"guided codes, {what}")
    result = guided_fake_quantize(y.cuda(), there, order=order, band=band)
    same(result + 0.0, dequantize(wanted, dtype) + 0.0, f"guided values, {what}")

    size = max(guide.codes.shape[1], k // 8) + guide.scales.shape[1]
    rows, zero_bits = (
        torch.zeros(n, size + 12, dtype=torch.uint8),
        torch.zeros(n, -(-k // 128), dtype=torch.uint8),
    )
    rows_device, zero_device = rows.cuda(), zero_bits.cuda()
    at = seed % 12
    arguments = {"code_bits": bits, "scale_bits": scale_bits, "order": order}
    quantize_into_rows(x, rows, at, zero_bits=zero_bits, tensor_scale=scale, **arguments)
    into = torch.empty_like(found_out)
    quantize_into_rows(
        device, rows_device, at, zero_bits=zero_device, values=into, tensor_scale=on_device, **arguments
    )
    same(rows_device, rows, f"rows, {what}")
    same(zero_device, zero_bits, f"zero blocks, {what}")
    same(into, out, f"values beside rows, {what}")

    # Nothing but one bit of the codes, under one tensor scale.
    scale = TensorScale(scale.value.reshape(-1)[0], scale.convention)
    arguments |= {"code_bits": 1, "tensor_scale": scale}
    quantize_into_rows(x, rows, at, zero_bits=zero_bits, **arguments)
    quantize_into_rows(device, rows_device, at, zero_bits=zero_device, **arguments)
    same(rows_device, rows, f"rows of one bit, {what}")
    same(zero_device, zero_bits, f"zero blocks of one bit, {what}")

    width = (0, 1, 2, 3, 4, 8)[seed % 6]
    packed = pack_bits(q.codes, width)
    same(pack_bits(found.codes, width), packed, f"pack, {width} bits")
    same(unpack_bits(packed.cuda(), width, k), unpack_bits(packed, width, k), f"unpack, {width} bits")
    if width in (1, 2, 3):
        low = (wanted.scales.roll(1) & ((1 << width) - 1)).contiguous()
        same(
            rebuild_scales(found.scales, low.cuda(), width),
            rebuild_scales(q.scales, low, width),
            f"rebuilt scales, {width} bits",
        )
    return x.numel()


def pieces(values: int) -> Iterator[tuple[int, int, int, torch.dtype, Order]]:
    """Cut the values to compare into 40 pieces, half of them in the default order."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    widths = (2048, 768, 64, 2048, 16, 128, 336)
    orders = [order for other in list(Order)[1:] for order in (Order.RECIPROCAL, other)]
    for seed in range(40):
        k = widths[seed % len(widths)]
        yield seed, -(-values // 40 // k) * k, k, dtypes[seed % 3], orders[seed % len(orders)]


def verify(values: int = VALUES) -> int:
    """Compare all functions with the CPU's on as many values; AssertionError where any differ."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = list(pool.map(lambda piece: verify_piece(*piece), pieces(values)))
    verify_marks()
    verify_gradient()
    return sum(counts)


def verify_marks() -> None:
    """A value that is not finite raises at once, or after a pass without synchronisation, with its site."""
    x = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    for bad, function in product((torch.nan, torch.inf, -torch.inf), (quantize, fake_quantize)):
        x[3, 5] = bad
        assert message(partial(function, x, site="here")).startswith("here holds NaN or Inf")
    flags = NonFiniteFlags("cuda")
    guide = Guide.of(quantize(torch.ones_like(x)), 4, 8)
    with flags:
        torch.cuda.set_sync_debug_mode("error")
        fake_quantize(torch.zeros_like(x), site="first")
        guided_fake_quantize(x, guide, site="second")
        torch.cuda.set_sync_debug_mode("default")
    assert message(flags.check).startswith("second holds NaN or Inf")
    assert not message(flags.check)
    guide.scales[2, 1] = 127
    assert "of third holds a whole block scale" in message(
        partial(guided_fake_quantize, torch.ones_like(x), guide, site="third")
    )


def message(function: Callable[[], object]) -> str:
    """Give what a call is refused with."""
    try:
        function()
    except (NonFiniteError, ValueError) as error:
        return str(error)
    return ""


def verify_gradient() -> None:
    """The gradient passes unchanged."""
    x = torch.randn(4, 32, device="cuda", requires_grad=True)
    guide = Guide.of(quantize(x))
    weight = torch.randn_like(x)
    for out in (fake_quantize(x), guided_fake_quantize(x, guide)):
        x.grad = None
        (out * weight).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, weight)


# -- cuts -------------------------------------------------------------------------------------------------

TUNED = {"NEAREST": "rtnFakeQuantize", "PARITIES": "rtnQuantizePack", "GUIDED": "guidedFakeQuantize1bit"}
"""By the name of a cut in `launch`: the kernel that is timed under it."""
TILES = ((32, 1), (64, 1), (64, 2), (128, 2), (128, 4), (256, 4), (512, 4))
"""Blocks of a tile, and warps of a program."""
PROGRAMS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
"""Programs a multiprocessor."""


def tune() -> None:
    """Time kernels under every cut at two sizes, and print the quickest as `launch` has them."""
    from tracerl.numerics.triton import launch

    cases = {
        size: [Case.of(size, seed) for seed in range(max(2, FOOTPRINT // size))]
        for size in (LARGE, 4 * LARGE)
    }
    for kind, name in TUNED.items():
        found = {}
        for tile, programs in product(TILES, (None,) if kind == "NEAREST" else PROGRAMS):
            cut = launch.Cut(*tile, programs)
            setattr(launch, kind, cut)
            taken = [seconds(KERNELS[name][0], some, SAMPLES) for some in cases.values()]
            found[cut] = math.prod(taken)
            print(f"{name} {cut}: {', '.join(f'{1e6 * one:.1f} us' for one in taken)}", flush=True)
        print(f"{kind} = {min(found, key=found.__getitem__)}", flush=True)


def main() -> None:
    """Compare, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--values", type=int, default=VALUES, help="how many to compare")
    parser.add_argument("--quick", action="store_true", help="two sizes")
    parser.add_argument(
        "--tune", action="store_true", help="time the kernels under other cuts than launch.py's"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "benchmarks/gpu/kernels.py: PyTorch sees no GPU here; run it on a machine with an NVIDIA GPU"
        )
    if arguments.verify:
        print(f"{verify(arguments.values)} values: every function gives the reference's bits")
        return
    if arguments.tune:
        tune()
        return
    result = measure(arguments.quick)
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
