"""The Triton kernels as compiled for GPUs that are not here: by Triton, LLVM and NVIDIA's assembler.

The interpreter runs what the kernels say in IEEE arithmetic. A compiler could still fuse a product and a sum,
approximate a division or flush what is small, each of which changes bits: whether it did is in what it wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = Path(__file__).parents[3] / "benchmarks/gpu/compiled.py"
FUSED = {
    # The sum that rounds to the grid, and what is subtracted again where the value is wanted. Both products
    # are exact.
    "quantize, Reciprocal": 1,
    "quantize and pack, 4/8 bits": 1,
    "capture, 4/8 bits": 2,
    # Besides, the product with the factor, onto 0: without codes the sign of a zero does not matter.
    "fake quantize, Reciprocal": 3,
    "capture, 1/3 bits": 3,
    # torchao keeps the sign of a zero: nothing is added to its product.
    "fake quantize, TorchAO": 2,
    # Thresholds are compared with.
    "quantize and pack, 1/3 bits": 0,
    # Both ends of the bracket are products. The reciprocal of a block's scale takes two.
    "guided by 1/3 bits, Reciprocal": 1 + 2 / 16,
    "guided by 1/3 bits, TorchAO": 0,
    # Rounded to nearest, then what was taken to its code.
    "guided by 4/8 bits, codes": 3 + 2 / 16,
}
"""Fused operations a value, as the kernels' sources have them."""


@pytest.mark.parametrize(("arch", "target"), [(90, "sm_90a"), (100, "sm_100a")])
def test_kernels_compiled_for_hopper_and_blackwell(tmp_path: Path, arch: int, target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILED), "--arch", str(arch), "--only", *FUSED, "--out", "found.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())["kernels"][str(arch)]
    assert {name: row["fusedPerValue"] for name, row in found.items()} == FUSED
    for name, row in found.items():
        assert row["target"] == target
        assert (row["spills"], row["spillBytes"]) == (0, 0), name
        # What a reciprocal begins with, of which two more operations make the nearest one.
        assert row["inexact"] == (["rcp.approx.ftz.f32"] if row["fusedPerValue"] % 1 else []), name
