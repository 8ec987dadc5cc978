"""Write what the packages give for a few thousand values, for `make test` to check without them.

Run by hand when a package's pinned version changes: `bash tests/peers/run.sh --golden`.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from inputs import hard, ordinary
from safetensors.torch import save_file
from torch import Tensor

from peers import NVFP4_PEERS, both, comparable, mx_torchao
from tracerl.numerics import pack_bits

GOLDEN = Path(__file__).parents[1] / "unit/numerics/golden/peers.safetensors"


def main() -> None:
    inputs = {"ordinary": ordinary(32, seed=3), "hard": hard()[:, :32].contiguous()}
    tensors: dict[str, Tensor] = {f"{name}/x": x for name, x in inputs.items()}
    for name, x in inputs.items():
        for order in NVFP4_PEERS:
            for fixed in (True, False):
                _, theirs = both(x, order, fixed)
                prefix = f"{name}/{order}/{'fixed' if fixed else 'amax'}"
                tensors[f"{prefix}/tensor_scale"] = theirs.tensor_scale.value
                tensors[f"{prefix}/scales"] = theirs.scales
                tensors[f"{prefix}/codes"] = pack_bits(theirs.codes, 4)
                tensors[f"{prefix}/comparable"] = pack_bits(comparable(x, theirs, order).byte(), 1)
    tensors["ordinary/MXFP4/codes"], tensors["ordinary/MXFP4/scales"] = mx_torchao(inputs["ordinary"])
    packages = ("torch", "fouroversix", "torchao", "nvidia-modelopt", "compressed-tensors")
    GOLDEN.parent.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, GOLDEN, {p: version(p) for p in packages})


if __name__ == "__main__":
    main()
