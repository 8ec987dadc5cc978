"""FP4 numerics: element casts, block scaling, guided rounding, and the bits that records are made of."""

from tracerl.api.job import RoundingOrder as Order
from tracerl.numerics.bits import pack_bits, unpack_bits
from tracerl.numerics.blocks import (
    MXFP4,
    NVFP4,
    BlockFormat,
    Quantized,
    TensorScale,
    dequantize,
    quantize,
    quantize_dequantize,
)
from tracerl.numerics.elements import E2M1, E4M3, E8M0, ElementFormat
from tracerl.numerics.flags import NonFiniteError, NonFiniteFlags
from tracerl.numerics.guidance import Guide, guided_quantize, rebuild_scales
from tracerl.numerics.mismatch import Mismatch, compare
from tracerl.numerics.rows import quantize_into_rows
from tracerl.numerics.straight_through import fake_quantize, guided_fake_quantize

__all__ = [
    "E2M1",
    "E4M3",
    "E8M0",
    "MXFP4",
    "NVFP4",
    "BlockFormat",
    "ElementFormat",
    "Guide",
    "Mismatch",
    "NonFiniteError",
    "NonFiniteFlags",
    "Order",
    "Quantized",
    "TensorScale",
    "compare",
    "dequantize",
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
