"""What each side of a job does with every place that the rollout quantises: a pure function of the job.

A method is data: for each site (layer, kind) the treatment in the rollout and in the trainer, and whether the
rollout records it. Engines read the plan and know nothing of method names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from tracerl.api.job import MethodName, RatioFrom, SecondInput, Spec, Target, Trace
from tracerl.api.model import ModelShape
from tracerl.records.sites import SiteKind, site_table


class Treatment(StrEnum):
    """What one side does with the values of a site."""

    UNQUANTIZED = "Unquantized"
    RTN = "RTN"
    GUIDED = "Guided"


@dataclass(frozen=True)
class SitePlan:
    """Both sides of one site; `recorded` says whether the rollout writes it into the trajectory's record."""

    rollout: Treatment
    trainer: Treatment
    recorded: bool


UNTOUCHED = SitePlan(Treatment.UNQUANTIZED, Treatment.UNQUANTIZED, recorded=False)


@dataclass(frozen=True)
class MethodPlan:
    """The whole method: sites, the experts' weights, and how strongly the trainer follows the record."""

    name: MethodName
    sites: Mapping[tuple[int, SiteKind], SitePlan]
    weights_rollout: Treatment
    """Routed experts' gate, up and down matrices as the rollout computes with them."""
    weights_trainer: Treatment
    guided: bool
    """Whether any site of the trainer is guided: if not, the guided and the unguided forward are one."""
    band: float | None
    """Drift band as a share of the bracket's width, 0 < band <= 0.5; None guides every value."""
    max_guided_version_diff: int | None
    """Rows more versions old than this are rounded to nearest; None guides every row."""
    ratio_from: RatioFrom

    def site(self, layer: int, kind: SiteKind) -> SitePlan:
        """Return the plan of one site; what no part of the job touches is unquantised on both sides."""
        return self.sites.get((layer, kind), UNTOUCHED)


def plan(spec: Spec, shape: ModelShape) -> MethodPlan:
    """Return what the job's method does at every site of a model of this shape."""
    name = spec.method.name
    trace = (spec.method.trace or Trace()) if name is MethodName.TRACE else None
    targets = set(spec.quantization.targets) if name is not MethodName.BF16 else set[Target]()
    recorded = {(site.layer, site.kind) for site in site_table(shape, spec).sites}
    trainer_default = Treatment.UNQUANTIZED if name is MethodName.VANILLA else Treatment.RTN

    quantized: list[tuple[int, SiteKind]] = []
    if Target.ROUTED_EXPERTS in targets:
        quantized += [(layer, SiteKind.EXPERT_INPUT) for layer in shape.moe_layers]
        if spec.quantization.second_input is not SecondInput.BF16:
            quantized += [(layer, SiteKind.FC2_INPUT) for layer in shape.moe_layers]
    if Target.KV_CACHE in targets:
        for layer in shape.full_attention_layers:
            quantized += [(layer, SiteKind.KEY), (layer, SiteKind.VALUE)]

    # Recorded by every method that needs them, and quantised by none.
    sites = {
        key: SitePlan(Treatment.UNQUANTIZED, Treatment.UNQUANTIZED, recorded=True)
        for key in recorded
        if key[1] in {SiteKind.ROUTES, SiteKind.EXACT_FROM}
    }
    for key in quantized:
        guided = trace is not None and key in recorded
        sites[key] = SitePlan(
            rollout=Treatment.RTN,
            trainer=Treatment.GUIDED if guided else trainer_default,
            recorded=key in recorded,
        )
    experts = Target.ROUTED_EXPERTS in targets
    return MethodPlan(
        name=name,
        sites=MappingProxyType(sites),
        weights_rollout=Treatment.RTN if experts else Treatment.UNQUANTIZED,
        weights_trainer=trainer_default if experts else Treatment.UNQUANTIZED,
        guided=any(site.trainer is Treatment.GUIDED for site in sites.values()),
        band=None if trace is None or trace.drift_band is None else float(trace.drift_band),
        max_guided_version_diff=None if trace is None else trace.max_guided_version_diff,
        ratio_from=RatioFrom.UNGUIDED if trace is None else trace.ratio_from,
    )
