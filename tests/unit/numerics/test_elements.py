"""Element casts against ml_dtypes and gfloat, over every finite FP16 and BF16 value."""

from __future__ import annotations

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e2m1, format_info_ocp_e4m3
from torch import Tensor

from tracerl.numerics import E2M1, E4M3, E8M0, ElementFormat

FORMATS = {
    "E2M1": (E2M1, ml_dtypes.float4_e2m1fn, format_info_ocp_e2m1),
    "E4M3": (E4M3, ml_dtypes.float8_e4m3fn, format_info_ocp_e4m3),
}


def every_finite(dtype: torch.dtype) -> Tensor:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    return x[x.isfinite()]


def cast(fmt: ElementFormat, x: Tensor) -> Tensor:
    return fmt.encode(fmt.round(x).copysign(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_finite_value(name: str, dtype: torch.dtype) -> None:
    fmt, ml_dtype, info = FORMATS[name]
    x = every_finite(dtype)
    codes = cast(fmt, x)

    # ml_dtypes gives NaN beyond the rounding range of E4M3, where a saturating cast gives the largest value.
    theirs = x.numpy().astype(ml_dtype)
    within = torch.from_numpy(np.isfinite(theirs.astype(np.float32)))
    assert within.sum() > 30_000
    assert torch.equal(codes[within], torch.from_numpy(theirs.view(np.uint8))[within])

    rounded = gfloat.round_ndarray(info, x.numpy().astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    assert torch.equal(codes, torch.from_numpy(gfloat.encode_ndarray(info, rounded).astype(np.uint8)))
    assert torch.equal(fmt.decode(codes), torch.from_numpy(rounded).float())
    assert torch.equal(fmt.round(x), torch.from_numpy(rounded).float())


@pytest.mark.parametrize("name", FORMATS)
def test_fp32_next_to_every_tie(name: str) -> None:
    fmt, _, info = FORMATS[name]
    grid = torch.tensor(fmt.magnitudes)
    ties = (grid[:-1] + grid[1:]) / 2
    x = torch.cat([grid, ties])
    x = torch.cat([x, torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(1e9))])
    x = torch.cat([x, -x])
    rounded = gfloat.round_ndarray(info, x.numpy().astype(np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    assert torch.equal(fmt.round(x), torch.from_numpy(rounded).float())


@pytest.mark.parametrize("name", FORMATS)
def test_codes_decode_as_ml_dtypes_and_encode_back(name: str) -> None:
    fmt, ml_dtype, _ = FORMATS[name]
    codes = torch.arange(2 * fmt.sign, dtype=torch.uint8)
    values = torch.from_numpy(codes.numpy().view(ml_dtype).astype(np.float32))
    assert torch.equal(fmt.decode(codes).nan_to_num(-1), values.nan_to_num(-1))
    finite = values.isfinite()
    assert finite.sum() == 2 * (fmt.largest_code + 1)
    assert torch.equal(fmt.encode(values[finite]), codes[finite])


def test_spacing_is_the_width_of_the_bracket() -> None:
    y = torch.tensor([0.0, 0.2, 0.5, 1.7, 2.0, 3.9, -4.0, 5.5])
    assert E2M1.spacing(y).tolist() == [0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0]


def test_e8m0_rounds_up_and_decodes_as_ml_dtypes() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    values = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert torch.equal(E8M0.decode(codes), values)
    assert torch.equal(E8M0.encode(values), codes)
    assert torch.equal(E8M0.round(values), values)
    above = torch.nextafter(values[:-1], torch.tensor(torch.inf))
    assert torch.equal(E8M0.round(above), values[1:])
    assert E8M0.round(torch.tensor([0.0, 2.0**-140, 2.0**-127, 2.0**-126])).log2().tolist() == [
        -127,
        -127,
        -127,
        -126,
    ]
