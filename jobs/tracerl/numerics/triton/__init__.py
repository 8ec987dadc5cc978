"""The functions of `tracerl.numerics` for CUDA tensors in NVFP4, as Triton kernels that give the same bits.

`tracerl.numerics` calls them by device, so nothing else needs to. They launch and return: all that waits for
the device is the question for errors outside `NonFiniteFlags`. Within, they can be captured in a CUDA graph,
after a call with the same widths, dtype, order and tensor scale: the first one compiles, and where it packs
one bit it copies thresholds of that scale to the device. Arguments are those of the functions of the same
name there.
"""

from tracerl.numerics.triton.launch import (
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

__all__ = [
    "fake_quantize",
    "guided_fake_quantize",
    "guided_quantize",
    "pack_bits",
    "quantize",
    "quantize_dequantize",
    "quantize_into_rows",
    "rebuild_scales",
    "unpack_bits",
]
