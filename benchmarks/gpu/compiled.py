"""Compiles the numerics' kernels for Hopper and Blackwell and reads their machine code; needs no GPU.

    python benchmarks/gpu/compiled.py [--arch 90 100] [--only TEXT ...] [--out FILE]

What a compiler can show of a GPU that is not here: that every kernel compiles for it, how many registers a
thread has, that none is spilled to memory, and that nothing is approximated, flushed to zero, or fused but
what the kernels fuse themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from kernels import executed, inspect
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tracerl.numerics import Guide, Order, TensorScale, quantize
from tracerl.numerics.triton import launch

ROWS, K = 16, 2048
"""K: the hidden width of Qwen3-30B-A3B, as kernels are compiled anew for other widths."""
ARCHITECTURES = {90: "Hopper: H100, H200", 100: "Blackwell: B200, GB200"}


class Compiler(NamedTuple):
    """What Triton asks its driver for before it compiles."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Compiled kernels are kept by device."""
        return self.target.arch

    def get_current_stream(self, _device: int) -> int:
        """Nothing is launched on it."""
        return 0


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Give a call of each variant of the kernels that a job has, with its name."""
    scale = TensorScale.one()
    by_row = TensorScale(torch.ones(ROWS, 1), "amax")
    x = {dtype: torch.ones(ROWS, K, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    bf16 = x[torch.bfloat16]
    rows = torch.empty(ROWS, K, dtype=torch.uint8)
    codes = quantize(bf16)

    def record(bits: int, scale_bits: int, *, values: bool) -> Callable[[], object]:
        return partial(
            launch.quantize_into_rows, bf16, rows, 0, code_bits=bits, scale_bits=scale_bits,
            zero_bits=torch.empty(ROWS, K // 128, dtype=torch.uint8), tensor_scale=scale,
            order=Order.RECIPROCAL, site="", values=torch.empty_like(bf16) if values else None,
        )  # fmt: skip

    def guide(bits: int, scale_bits: int) -> Guide:
        return replace(Guide.of(codes, bits, scale_bits), present=torch.ones(ROWS, dtype=torch.bool))

    for order in Order:
        yield f"quantize, {order.value}", partial(launch.quantize, bf16, scale, order, "")
        yield f"fake quantize, {order.value}", partial(launch.fake_quantize, bf16, scale, order, "")
        yield (
            f"guided by 1/3 bits, {order.value}",
            partial(launch.guided_fake_quantize, bf16, guide(1, 3), order, None, ""),
        )
    for dtype in (torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield f"fake quantize, {name}", partial(launch.fake_quantize, x[dtype], scale, Order.RECIPROCAL, "")
        yield (
            f"guided by 1/3 bits, {name}",
            partial(launch.guided_fake_quantize, x[dtype], guide(1, 3), Order.RECIPROCAL, None, ""),
        )
    yield "fake quantize, scales by row", partial(launch.fake_quantize, bf16, by_row, Order.RECIPROCAL, "")
    for bits, scale_bits in ((1, 3), (2, 2), (4, 8)):
        for values in (False, True):
            what = "capture" if values else "quantize and pack"
            yield f"{what}, {bits}/{scale_bits} bits", record(bits, scale_bits, values=values)
    for bits, scale_bits in ((0, 0), (2, 2), (4, 8)):
        yield (
            f"guided by {bits}/{scale_bits} bits",
            partial(launch.guided_fake_quantize, bf16, guide(bits, scale_bits), Order.RECIPROCAL, None, ""),
        )
    yield (
        "guided by 1/3 bits in a band",
        partial(launch.guided_fake_quantize, bf16, guide(1, 3), Order.RECIPROCAL, 0.125, ""),
    )
    yield (
        "guided by 4/8 bits, codes",
        partial(launch.guided_quantize, bf16, guide(4, 8), Order.RECIPROCAL, None, ""),
    )
    yield "pack 3 bits", partial(launch.pack_bits, codes.codes, 3)
    yield "unpack 3 bits", partial(launch.unpack_bits, rows[:, : 3 * K // 8], 3, K)
    yield "rebuild scales, 3 bits", partial(launch.rebuild_scales, codes.scales, codes.scales, 3, "")


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Compile for a GPU what is launched, and launch nothing; gives the list that compiled kernels go to."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(run(self, *args, **kwargs | {"warmup": True}))

    driver.set_active(Compiler(GPUTarget("cuda", arch, 32)))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def values_of(kernel: Any) -> float:
    """How many values a thread of a compiled kernel computes in a tile."""
    threads = 32 * kernel.metadata.num_warps
    cuts = {
        "quantize_kernel": launch.NEAREST,
        "parity_kernel": launch.PARITIES,
        "guided_kernel": launch.GUIDED,
    }
    cut = cuts.get(kernel.metadata.name)
    return (launch._ELEMENTS if cut is None else 16 * cut.blocks) / threads


def read(kernel: Any) -> dict[str, Any]:
    """Count what the machine code of a compiled kernel uses, and name what in it is not IEEE arithmetic."""
    usage = inspect(kernel.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    listing = inspect(kernel.asm["cubin"], "nvdisasm", "-c")
    ptx, values = kernel.asm["ptx"], values_of(kernel)
    fused = re.findall(r"\bfma\.rn\.f32(x2)?", ptx)
    return {
        "kernel": kernel.metadata.name,
        "target": one(r"\.target (\S+)", ptx),
        "registers": int(one(r"REG:(\d+)", usage)),
        "spillBytes": int(one(r"STACK:(\d+)", usage)) + int(one(r"LOCAL:(\d+)", usage)),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        "instructionsPerValue": round(executed(listing) / values, 2),
        "fusedPerValue": sum(2 if pair else 1 for pair in fused) / values,
        "inexact": sorted(set(re.findall(r"\b\w+\.[\w.]*\b(?:approx|ftz|full)\b[\w.]*", ptx))),
    }


def one(pattern: str, text: str) -> str:
    """Find the group of a pattern."""
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def main() -> None:
    """Compile, and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, nargs="+", default=[*ARCHITECTURES], help="90 is sm_90a")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="kernels whose name begins so"
    )
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    arguments = parser.parse_args()
    if triton.knobs.runtime.interpret:
        sys.exit(
            "benchmarks/gpu/compiled.py: TRITON_INTERPRET is set, and nothing is compiled then; unset it"
        )
    result: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "kernels": {}}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # what was compiled before is compiled again
        for arch in arguments.arch:
            print(f"sm_{arch}a, {ARCHITECTURES.get(arch, 'unknown')}")
            print(f"{'':36}{'registers':>10}{'instructions a value':>22}{'spills':>8}")
            rows = result["kernels"][str(arch)] = {}
            with compiling(arch) as found:
                for name, call in calls():
                    if not name.startswith(tuple(arguments.only)):
                        continue
                    call()
                    (kernel,) = found
                    found.clear()
                    rows[name] = row = read(kernel)
                    print(
                        f"{name:36}{row['registers']:10}{row['instructionsPerValue']:22.2f}{row['spills']:8}",
                        flush=True,
                    )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
