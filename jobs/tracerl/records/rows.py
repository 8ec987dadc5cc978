"""Rows of one site: quantised values, expert ids or positions to packed bytes, and the latter two back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracerl.api.job import TensorScaleRule
from tracerl.numerics import NVFP4, Quantized, pack_bits
from tracerl.records.sites import Site, SiteKind, SiteTable


def pack_rows(site: Site, quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Pack the rows of one site.

    quantized: codes uint8 [n, dim] and scales uint8 [n, blocks]. Returns rows uint8 [n, row_bytes] and the
    zero blocks int64 [m, 2] as (row, block), sorted: blocks whose scale code is 0, of which low bits say
    nothing. ValueError when the shapes are not the site's.
    """
    codes, scales = quantized.codes, quantized.scales
    n = codes.shape[0]
    if codes.shape != (n, site.dim) or scales.shape != (n, site.blocks):
        raise ValueError(
            f"{site.name} takes codes [n, {site.dim}] and scales [n, {site.blocks}], "
            f"not {list(codes.shape)} and {list(scales.shape)}"
        )
    parts = [pack_bits(codes, site.code_bits), pack_bits(scales, site.scale_bits)]
    if site.tensor_scale == TensorScaleRule.PER_TOKEN:
        parts.append(quantized.tensor_scale.value.float().expand(n, 1).contiguous().view(torch.uint8))
    return torch.cat(parts, dim=1), (scales == 0).nonzero()


def pack_routes(site: Site, ids: Tensor) -> Tensor:
    """Pack expert ids int [n, top_k] to uint8 [n, row_bytes]; ValueError for an id outside 0..experts-1."""
    if ids.ndim != 2 or ids.shape[1] != site.dim:
        raise ValueError(f"{site.name} takes expert ids [n, {site.dim}], not {list(ids.shape)}")
    if ids.numel():
        least, most = ids.aminmax()
        if not 0 <= int(least) <= int(most) < site.experts:
            raise ValueError(f"{site.name} has expert ids outside 0..{site.experts - 1}")
    return route_bytes(site, ids)


def route_bytes(site: Site, ids: Tensor) -> Tensor:
    """`pack_routes` of ids that a router has just chosen, without looking at them."""
    low = (ids & 0xFF).to(torch.uint8)
    if site.format == "U8":
        return low
    return torch.stack((low, (ids >> 8).to(torch.uint8)), dim=-1).flatten(-2)


def unpack_routes(site: Site, rows: Tensor) -> Tensor:
    """Unpack uint8 [..., row_bytes] to expert ids int64 [..., top_k]."""
    if site.format == "U8":
        return rows.long()
    pairs = rows.long().reshape(*rows.shape[:-1], site.dim, 2)
    return pairs[..., 0] | (pairs[..., 1] << 8)


def pack_starts(site: Site, starts: Tensor) -> Tensor:
    """Pack positions int [n, 1] to uint8 [n, 4]; ValueError for one that no u32 holds."""
    if starts.shape != (len(starts), site.dim):
        raise ValueError(f"{site.name} takes positions [n, {site.dim}], not {list(starts.shape)}")
    if starts.numel() and not 0 <= int(starts.min()) <= int(starts.max()) < 2**31:
        raise ValueError(f"{site.name} has positions outside 0..2**31-1")
    return torch.stack([(starts[:, 0] >> shift & 0xFF).to(torch.uint8) for shift in (0, 8, 16, 24)], dim=1)


def unpack_starts(rows: Tensor) -> Tensor:
    """Unpack uint8 [n, 4] to positions int64 [n]."""
    bytes_n4 = rows.long()
    return bytes_n4[:, 0] | bytes_n4[:, 1] << 8 | bytes_n4[:, 2] << 16 | bytes_n4[:, 3] << 24


def impossible(table: SiteTable, rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell which sites of rows uint8 [n, table.row_bytes] no correct writer can have made: bool [n, sites].

    An expert id must exist; a position has 31 bits; a whole E4M3 scale is neither negative nor NaN; a row's
    tensor scale is a positive number. A checksum says that bytes are as written, not that the writer was
    right.
    """
    wrong = np.zeros((len(rows), len(table.sites)), dtype=np.bool_)
    for site, members, columns in table.alike:
        if site.kind is SiteKind.ROUTES and site.experts < 2 ** (8 if site.format == "U8" else 16):
            ids = rows.take(columns, axis=1).view("u1" if site.format == "U8" else "<u2")
            _mark(wrong, members, ids >= site.experts)
        if site.kind is SiteKind.EXACT_FROM:
            _mark(wrong, members, rows.take(columns, axis=1)[..., -1:] >= 0x80)
        if site.scale_bits == 8 and site.format == NVFP4.name:
            start = site.code_bytes
            scales = rows.take(columns[:, start : start + site.scale_bytes], axis=1)
            _mark(wrong, members, scales >= 0x7F)
        if site.tensor_scale == TensorScaleRule.PER_TOKEN:
            value = rows.take(columns[:, -4:], axis=1).view("<f4")
            _mark(wrong, members, ~(np.isfinite(value) & (value > 0)))
    return wrong


def _mark(wrong: NDArray[np.bool_], members: NDArray[np.intp], found: NDArray[np.bool_]) -> None:
    """Add to `wrong` [n, sites] what was found of some of the sites: bool [n, members, any]."""
    if np.count_nonzero(found):
        wrong[:, members] |= found.any(axis=2)
