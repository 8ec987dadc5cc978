"""The public packages behind one signature: values and a tensor scale in, packed codes and scale bytes out.

Each function calls its package's own entry point, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracerl.numerics import E4M3, Order, Quantized, TensorScale, quantize, unpack_bits

Result = tuple[Tensor, Tensor]
"""Packed codes u8 [rows, K / 2], even index in the low nibble, and scale bytes u8 [rows, K / block]."""


def fouroversix(x: Tensor, amax: Tensor) -> Result:
    """fouroversix static_6; tensor scale in the amax convention."""
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import ScaleRule

    packed, scales, _ = quantize_to_fp4(
        x, amax, scale_rule=ScaleRule.static_6, use_blackwell_scale_layout=False
    )
    return packed, scales.view(torch.uint8).view(len(x), -1)


def torchao(x: Tensor, decode: Tensor) -> Result:
    """torchao nvfp4_quantize; tensor scale in the decode convention."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, packed = nvfp4_quantize(x, per_tensor_scale=decode)
    return packed, scales.view(torch.uint8)


def modelopt(x: Tensor, decode: Tensor) -> Result:
    """ModelOpt NVFP4QTensor; tensor scale in the decode convention."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    quantized, scales, _ = NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=decode)
    return quantized._quantized_data, scales.view(torch.uint8)


def compressed_tensors(x: Tensor, encode: Tensor) -> Result:
    """compressed-tensors' NVFP4 preset; tensor scale in the encode convention."""
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = NVFP4["input_activations"]
    scales, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=encode.reshape(1))
    packed = quantize_and_pack_fp4(x, scales, global_scale=encode.reshape(1), group_size=16)
    return packed, scales.to(torch.float8_e4m3fn).view(torch.uint8)


def mx_torchao(x: Tensor) -> Result:
    """torchao to_mx, rule RCEIL."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    scales, packed = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
    return packed.view(torch.uint8), scales.view(torch.uint8)


def mx_fouroversix(x: Tensor) -> Result:
    """fouroversix MXFP4 static_6."""
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, ScaleRule

    packed, scales, _ = quantize_to_fp4(
        x, fp4_format=DataType.mxfp4, scale_rule=ScaleRule.static_6, use_blackwell_scale_layout=False
    )
    return packed, scales.view(torch.uint8).view(len(x), -1)


NVFP4_PEERS: dict[str, tuple[str, Callable[[Tensor, Tensor], Result]]] = {
    "FourOverSix": ("amax", fouroversix),
    "TorchAO": ("decode", torchao),
    "ModelOpt": ("decode", modelopt),
    "CompressedTensors": ("encode", compressed_tensors),
}
"""Order, the convention of its package's tensor scale, the package."""


def given_scale(x: Tensor, convention: str, fixed: bool) -> Tensor:
    """Give the tensor scale as the packages compute it from x, or the fixed scale 1."""
    amax = torch.tensor(2688.0) if fixed else x.abs().max().float()
    if convention == "encode":
        from compressed_tensors.quantization.utils import generate_gparam

        return generate_gparam(-amax, amax).reshape(())
    return amax if convention == "amax" else amax / 2688


def both(x: Tensor, order: str, fixed: bool) -> tuple[Quantized, Quantized]:
    """Ours and the package's, of x [rows, K]."""
    convention, peer = NVFP4_PEERS[order]
    scale = TensorScale(given_scale(x, convention, fixed), convention)
    packed, scales = peer(x.clone(), scale.value.clone())
    ours = quantize(x, tensor_scale=scale, order=Order(order))
    return ours, Quantized(unpack_bits(packed, 4, x.shape[-1]), scales, scale, ours.fmt)


def comparable(x: Tensor, theirs: Quantized, order: str) -> Tensor:
    """Where the package's own arithmetic means something: bool [rows, K].

    Not where its tensor scale or a block scale overflowed, nor below a scale of zero, where codes mean
    nothing. fouroversix does not saturate: a scaled magnitude of 7 or more, which only a saturated or a
    coarsely rounded subnormal scale leaves, rounds to 8 and beyond, and its encoder makes that minus zero.
    """
    decode = theirs.tensor_scale.decode()
    if not (decode.isfinite() and decode > 0 and decode.reciprocal().isfinite()):
        return torch.zeros_like(x, dtype=torch.bool)
    meaningful = ((theirs.scales > 0) & (theirs.scales < 127)).repeat_interleave(16, -1)
    if order == "FourOverSix":
        step = E4M3.decode(theirs.scales).double().repeat_interleave(16, -1) * decode.double()
        meaningful &= x.double().abs() < 6.999 * step
    return meaningful
