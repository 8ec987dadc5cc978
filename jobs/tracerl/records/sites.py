"""What a job records: sites, and the site table that rollout and trainer compute independently of each other.

A site is (layer, kind). The table is a pure function of model shape and spec; both sides compare its digest
at start and in every frame, so a record can never be read under a contract other than its writer's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracerl.api.errors import InputError
from tracerl.api.job import (
    Format,
    LayerPolicy,
    Layers,
    MethodName,
    PrefillAttends,
    SecondInput,
    Spec,
    Target,
    TensorScaleRule,
    Trace,
)
from tracerl.api.model import ModelShape
from tracerl.numerics import MXFP4, NVFP4, BlockFormat

TABLE_VERSION = 1
_MAX_LAYOUTS = 256


class SiteKind(StrEnum):
    """What is recorded at a layer, in the order in which sites of one layer are laid out."""

    EXPERT_INPUT = "ExpertInput"
    KEY = "Key"
    VALUE = "Value"
    ROUTES = "Routes"
    FC2_INPUT = "FC2Input"
    EXACT_FROM = "ExactFrom"


_KIND_ORDER = {kind: index for index, kind in enumerate(SiteKind)}
BLOCK_FORMATS: dict[Format, BlockFormat] = {Format.NVFP4: NVFP4, Format.MXFP4: MXFP4}
# How a block's largest magnitude becomes its scale; MXFP4's next power of two never saturates.
_SCALE_RULES = {Format.NVFP4: "AmaxNearestEven", Format.MXFP4: "AmaxCeiling"}


@dataclass(frozen=True, slots=True)
class Site:
    """One recorded site: how many values a row has there, and how each became bits.

    A row is `code_bytes` of packed low code bits, then `scale_bytes` of packed low scale bits, then 4 bytes
    of float32 tensor scale when the rule is PerToken. `dim` values fall into `groups` of equal width that a
    tensor-parallel rank may hold apart: heads of Key and Value (dim = kv_heads * head_dim), expert slots of
    FC2Input (dim = top_k * expert_hidden, in the order of Routes), one group elsewhere. Routes hold `dim` =
    top_k expert ids below `experts` in format U8 or U16 and none of the quantisation fields. ExactFrom holds
    one number in format U32, and none of them either.
    """

    layer: int
    kind: SiteKind
    dim: int
    groups: int
    format: str
    block: int = 0
    code_bits: int = 0
    scale_bits: int = 0
    order: str = ""
    tie_rule: str = ""
    scale_rule: str = ""
    source_dtype: str = ""
    tensor_scale: str = ""
    tensor_scale_value: float = 0.0
    tensor_scale_convention: Literal["", "amax", "encode", "decode"] = ""
    experts: int = 0

    @property
    def name(self) -> str:
        """Name for messages, such as ``layer 3 ExpertInput``."""
        return f"layer {self.layer} {self.kind}"

    @property
    def blocks(self) -> int:
        """Blocks, and so scales, a row; 0 for Routes and ExactFrom."""
        return self.dim // self.block if self.block else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of packed codes (or of expert ids, or of a number) a row."""
        return self.slice_bytes(0, self.groups)[0]

    @property
    def scale_bytes(self) -> int:
        """Bytes of packed block scales a row."""
        return self.slice_bytes(0, self.groups)[1]

    @property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return sum(self.slice_bytes(0, self.groups))

    def slice_bytes(self, start: int, stop: int) -> tuple[int, int, int]:
        """Bytes a row of codes, scales and tensor scale when only groups start..stop-1 are held."""
        values = self.dim // self.groups * (stop - start)
        if self.kind is SiteKind.ROUTES:
            return values * (1 if self.format == "U8" else 2), 0, 0
        if self.kind is SiteKind.EXACT_FROM:
            return 4 * values, 0, 0
        codes = (values * self.code_bits + 7) // 8
        scales = (values // self.block * self.scale_bits + 7) // 8
        return codes, scales, 4 if self.tensor_scale == TensorScaleRule.PER_TOKEN else 0


class SiteSlice(NamedTuple):
    """Groups start..stop-1 of site number `site` of a table: what one section of a frame holds."""

    site: int
    start: int
    stop: int


class Alike(NamedTuple):
    """Sites of a table that differ in nothing but their layer."""

    site: Site
    """One of them, moved to layer 0."""
    members: NDArray[np.intp]
    """Their positions in the table."""
    columns: NDArray[np.intp]
    """Where in a row over all sites each byte of each of them is: [members, row_bytes]."""


class Layout(NamedTuple):
    """What a table says about one choice of slices, worked out once."""

    widths: tuple[int, ...]
    """Bytes a row of each slice."""
    tensor_scales: tuple[float | None, ...]
    """Value that a section of each slice must carry; None where every version has its own."""
    whole: bool
    """Whether the slices are all sites with all their groups."""


@dataclass(frozen=True)
class SiteTable:
    """All sites of a job, sorted by layer and kind; `audit` tables hold whole codes and scales."""

    sites: tuple[Site, ...]
    audit: bool = False

    @cached_property
    def digest(self) -> str:
        """sha256 (64 hex digits) of `canonical_json`."""
        return hashlib.sha256(self.canonical_json).hexdigest()

    @cached_property
    def canonical_json(self) -> bytes:
        """The table as JSON: keys sorted, no spaces, ASCII; the float32 tensor scale as its 8 hex digits."""
        sites = []
        for site in self.sites:
            fields = asdict(site)
            fields["tensor_scale_value"] = struct.pack(">f", site.tensor_scale_value).hex()
            sites.append(fields)
        document = {"version": TABLE_VERSION, "audit": self.audit, "sites": sites}
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row over all sites."""
        return sum(site.row_bytes for site in self.sites)

    @cached_property
    def _offsets(self) -> dict[tuple[int, SiteKind], tuple[int, int]]:
        found, offset = {}, 0
        for index, site in enumerate(self.sites):
            found[site.layer, site.kind] = (index, offset)
            offset += site.row_bytes
        return found

    def find(self, layer: int, kind: SiteKind) -> Site | None:
        """Return the site of a layer, or None when it is not recorded."""
        place = self._offsets.get((layer, kind))
        return None if place is None else self.sites[place[0]]

    def index(self, site: Site) -> int:
        """Position of a site in the table; KeyError when it is of another table."""
        index = self._offsets[site.layer, site.kind][0]
        if self.sites[index] != site:
            raise KeyError(site.name)
        return index

    def offset(self, site: Site) -> int:
        """First byte of the site in a row over all sites (codes, then scales, then tensor scale)."""
        self.index(site)
        return self._offsets[site.layer, site.kind][1]

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """First byte of each site in a row over all sites, and the end of the last."""
        return (*(offset for _, offset in self._offsets.values()), self.row_bytes)

    @cached_property
    def alike(self) -> tuple[Alike, ...]:
        """The sites, those together that differ in nothing but their layer."""
        groups: dict[Site, list[int]] = {}
        for index, site in enumerate(self.sites):
            groups.setdefault(replace(site, layer=0), []).append(index)
        starts = np.array(self.columns)
        return tuple(
            Alike(site, np.array(members), starts[members][:, None] + np.arange(site.row_bytes))
            for site, members in groups.items()
        )

    @cached_property
    def first_group(self) -> tuple[int, ...]:
        """Position of each site's first group among the groups of all sites, and the number of them."""
        return (0, *itertools.accumulate(site.groups for site in self.sites))

    @cached_property
    def per_version(self) -> bool:
        """Whether any site has a tensor scale of its own in every version."""
        return any(site.tensor_scale == TensorScaleRule.PER_VERSION for site in self.sites)

    @cached_property
    def _layouts(self) -> dict[tuple[SiteSlice, ...], Layout]:
        return {}

    def layout(self, slices: tuple[SiteSlice, ...]) -> Layout:
        """Work out the layout of slices; ValueError when they are none, unsorted or not in the table."""
        found = self._layouts.get(slices)
        if found is not None:
            return found
        last = -1
        for piece in slices:
            if not last < piece.site < len(self.sites):
                raise ValueError("slices must name sites of the table in increasing order")
            if not 0 <= piece.start < piece.stop <= self.sites[piece.site].groups:
                raise ValueError(f"{self.sites[piece.site].name} has no groups {piece.start}..{piece.stop}")
            last = piece.site
        if not slices:
            raise ValueError("a frame without sections says nothing; do not write it")
        sites = [self.sites[piece.site] for piece in slices]
        layout = Layout(
            tuple(sum(site.slice_bytes(p.start, p.stop)) for site, p in zip(sites, slices, strict=True)),
            tuple(
                None if site.tensor_scale == TensorScaleRule.PER_VERSION else site.tensor_scale_value
                for site in sites
            ),
            slices == self.whole,
        )
        # Slices also come from foreign bytes: what is kept of them must be bounded.
        if len(self._layouts) < _MAX_LAYOUTS:
            self._layouts[slices] = layout
        return layout

    @cached_property
    def whole(self) -> tuple[SiteSlice, ...]:
        """The slices of all sites with all their groups."""
        return self.select()

    def select(self, part: int = 0, parts: int = 1) -> tuple[SiteSlice, ...]:
        """Choose the slices that tensor-parallel rank `part` of `parts` writes.

        Heads of Key and Value are dealt out in contiguous runs; with more ranks than heads the first rank
        that has a head writes it. Everything else is replicated over the ranks and written by part 0.
        """
        if not 0 <= part < parts:
            raise ValueError(f"part {part} of {parts} does not exist")
        slices = []
        for index, site in enumerate(self.sites):
            if site.kind not in {SiteKind.KEY, SiteKind.VALUE}:
                if part == 0:
                    slices.append(SiteSlice(index, 0, site.groups))
                continue
            start, stop = (-(-site.groups * p // parts) for p in (part, part + 1))
            if start < stop:
                slices.append(SiteSlice(index, start, stop))
        return tuple(slices)


def selected_layers(
    policy: Layers, candidates: Sequence[int], layers: int, kind: SiteKind
) -> tuple[int, ...]:
    """Those of `candidates` that a layer policy selects, for a model of `layers` layers.

    LastHalf is the last half of all layers, but of the candidates (the full-attention layers) for Key and
    Value; of an odd number the larger half. Last and List count all layers for every kind.
    """
    if policy.policy is LayerPolicy.ALL:
        return tuple(candidates)
    if policy.policy is LayerPolicy.LAST_HALF:
        if kind in {SiteKind.KEY, SiteKind.VALUE}:
            return tuple(candidates[len(candidates) // 2 :])
        wanted = range(layers // 2, layers)
    elif policy.policy is LayerPolicy.LAST:
        if policy.last is None:
            raise InputError("spec.method.trace.layers: policy Last needs last; write for example last: 4")
        wanted = range(max(0, layers - policy.last), layers)
    else:
        if policy.indices is None:
            raise InputError("spec.method.trace.layers: policy List needs indices; write for example [2, 3]")
        return tuple(layer for layer in candidates if layer in policy.indices)
    return tuple(layer for layer in candidates if layer in wanted)


def _quantised(shape: ModelShape, spec: Spec, layers: Layers, code_bits: int, scale_bits: int) -> list[Site]:
    quantization = spec.quantization
    fmt = BLOCK_FORMATS[quantization.format]
    kinds: list[tuple[SiteKind, tuple[int, ...], int, int]] = []
    if Target.ROUTED_EXPERTS in quantization.targets:
        kinds.append((SiteKind.EXPERT_INPUT, shape.moe_layers, 1, shape.hidden))
        if quantization.second_input is SecondInput.RECORDED:
            kinds.append((SiteKind.FC2_INPUT, shape.moe_layers, shape.top_k, shape.expert_hidden))
    if Target.KV_CACHE in quantization.targets:
        for kind in (SiteKind.KEY, SiteKind.VALUE):
            kinds.append((kind, shape.full_attention_layers, shape.kv_heads, shape.head_dim))
    sites = []
    for kind, candidates, groups, width in kinds:
        if width % fmt.block:
            raise InputError(
                f"{kind} has {width} values a group, which {fmt.name} cannot cut into blocks of {fmt.block}; "
                "use a model whose hidden size, head dimension and expert width are multiples of it, or "
                "take the target out of spec.quantization.targets"
            )
        for layer in selected_layers(layers, candidates, shape.layers, kind):
            sites.append(
                Site(
                    layer=layer,
                    kind=kind,
                    dim=groups * width,
                    groups=groups,
                    format=fmt.name,
                    block=fmt.block,
                    code_bits=code_bits,
                    scale_bits=scale_bits,
                    order=quantization.order.value,
                    tie_rule="NearestEven",
                    scale_rule=_SCALE_RULES[quantization.format],
                    source_dtype=spec.model.dtype.value,
                    tensor_scale=quantization.tensor_scale.value,
                    tensor_scale_value=1.0 if quantization.tensor_scale is TensorScaleRule.FIXED else 0.0,
                    tensor_scale_convention="encode",
                )
            )
    return sites


def _table(sites: list[Site], *, audit: bool = False) -> SiteTable:
    return SiteTable(tuple(sorted(sites, key=lambda site: (site.layer, _KIND_ORDER[site.kind]))), audit)


def site_table(shape: ModelShape, spec: Spec) -> SiteTable:
    """Make the table of what the job records for training.

    TRACE records the chosen layers of the quantised targets; every method records Routes of all MoE layers
    when `algorithm.routingReplay` is on. With `quantization.prefillAttends: Exact` one whose trainer
    quantises keys and values records ExactFrom, at the first layer that has any. InputError when a width
    cannot be cut into blocks.
    """
    sites = []
    if spec.method.name is MethodName.TRACE:
        trace = spec.method.trace or Trace()
        sites = _quantised(shape, spec, trace.layers, trace.code_bits, trace.scale_bits)
    if spec.algorithm.routing_replay:
        for layer in shape.moe_layers:
            sites.append(
                Site(
                    layer=layer,
                    kind=SiteKind.ROUTES,
                    dim=shape.top_k,
                    groups=1,
                    format="U8" if shape.experts <= 256 else "U16",
                    experts=shape.experts,
                )
            )
    if (
        spec.quantization.prefill_attends is PrefillAttends.EXACT
        and Target.KV_CACHE in spec.quantization.targets
        and spec.method.name in {MethodName.QAT, MethodName.TRACE}
    ):
        layer = shape.full_attention_layers[0]
        sites.append(Site(layer=layer, kind=SiteKind.EXACT_FROM, dim=1, groups=1, format="U32"))
    return _table(sites)


def audit_table(shape: ModelShape, spec: Spec) -> SiteTable:
    """Make the table of an audited trajectory: whole codes and scales of everything the rollout quantises."""
    if spec.method.name is MethodName.BF16:
        return _table([], audit=True)
    every = Layers(policy=LayerPolicy.ALL)
    return _table(_quantised(shape, spec, every, code_bits=4, scale_bits=8), audit=True)
