"""Run directories with made-up numbers, to test and to look at what reads them.

`python tests/unit/observe/sample_runs.py DIR` writes a few and their reports; the numbers mean nothing.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

from tracerl.api.job import TraceRLJob
from tracerl.api.resolved import Endpoint, Endpoints, ResolvedJob, RunLayout
from tracerl.observe.report import write_report
from tracerl.observe.run import load_run
from tracerl.observe.runlog import RunLog
from tracerl.rl.steprecord import (
    EventRecord,
    Expectation,
    FinishRecord,
    Gap,
    Lengths,
    Overhead,
    Policy,
    PositionGap,
    Records,
    Reward,
    SiteMismatch,
    Staleness,
    StartRecord,
    StepRecord,
    StepSeconds,
    Transport,
)

START = 1_790_000_000.0
GAPS = {"BF16": 0.005, "Vanilla": 0.105, "QAT": 0.063, "TRACE": 0.005}


def job_document(
    method: str = "TRACE", *, name: str = "sample", seed: int = 1, steps: int = 40
) -> dict[str, Any]:
    return {
        "apiVersion": "tracerl.dev/v1alpha1",
        "kind": "TraceRLJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "builtin://tiny-moe"},
            "task": {"name": "builtin/chain_sum"},
            "algorithm": {"steps": steps, "promptsPerStep": 64, "samplesPerPrompt": 8, "seed": seed},
            "method": {"name": method},
            "expect": {"maxGapRatio": "0.5", "maxOverhead": "0.25"} if method == "TRACE" else {},
        },
    }


def job_of(method: str = "TRACE", **options: Any) -> TraceRLJob:
    return TraceRLJob.model_validate(job_document(method, **options))


def make_step(
    step: int, method: str = "TRACE", *, steps: int = 40, seed: int = 1, **changes: Any
) -> StepRecord:
    """A plausible step; the same arguments give the same record."""
    draw = random.Random(f"{method} {seed} {step}")
    guides, records = method == "TRACE", method != "BF16"
    gap = GAPS[method] * draw.uniform(0.85, 1.2)
    unguided = GAPS["QAT"] * draw.uniform(0.85, 1.2)
    reward = 0.55 + 0.25 * (1 - math.exp(-step / 15)) + draw.gauss(0, 0.025)

    def gap_of(mean: float) -> Gap:
        buckets = [
            PositionGap(start=a, stop=b, tokens=512 * (b - a), mean=mean * k, max=mean * 9 * k)
            for a, b, k in ((0, 1, 1.6), (1, 2, 1.1), (2, 4, 0.8), (4, 6, 0.7))
        ]
        return Gap(mean=mean, max=mean * 14.4, tokens=3072, by_position=tuple(buckets))

    fetch, unpack = (0.021, 0.017) if guides else (0.002, 0.001) if records else (0.0, 0.0)
    seconds = {
        "generate_wait": 0.31 * draw.uniform(0.9, 1.2),
        "fetch": fetch,
        "load": 0.004 if guides else 0.0,
        "unpack": unpack,
        "forward_old_guided": 0.2,
        "forward_old_unguided": 0.19 if guides else 0.0,
        "train_forward": 0.31 * draw.uniform(0.95, 1.1),
        "train_backward": 0.3,
        "optimizer": 0.04,
        "push_weights": 0.05,
        "evaluate": 0.2 if step % 10 == 0 else 0.0,
        "checkpoint": 0.06 if step % 10 == 0 else 0.0,
    }
    total = sum(seconds.values()) + 0.012
    critical = total - seconds["evaluate"] - seconds["checkpoint"]
    kernels, extra = (0.052, seconds["forward_old_unguided"]) if guides else (0.0, 0.0)
    cost = fetch + unpack + (0.018 if records else 0.0)
    row_bytes = 58 if guides else 8 if records else 0
    rows = 8192 if records else 0
    missing = {"missing": 3, "checksum": 1} if guides and step == 12 else {}
    values = {
        "run_id": f"run-{seed}",
        "time": START + 10 + 1.6 * step,
        "step": step,
        "steps": steps,
        "version": step,
        "method": method,
        "trajectories": 512,
        "prompt_tokens": 5120,
        "response_tokens": 3072,
        "tokens_per_second": 3072 / critical,
        "reward": Reward(mean=reward, std=0.4, min=0.0, max=1.0, groups=64, groups_without_signal=21),
        "held_out_reward": min(0.56 + 0.004 * step + 0.01 * seed, 0.99) if step % 10 == 0 else None,
        "gap_guided": gap_of(gap),
        "gap_unguided": gap_of(unguided) if guides else None,
        "gap_ratio": gap / unguided if guides else None,
        "rollout_corr": {
            "kl": gap * 0.1,
            "k3_kl": gap * 0.05,
            "rollout_is_mean": 1 + gap * draw.gauss(0, 1),
            "rollout_is_max": 1 + gap * 20,
            "rollout_is_min": 1 / (1 + gap * 20),
            "rollout_is_eff_sample_size": 1 / (1 + gap),
        },
        "staleness": Staleness(
            trajectories={0: 64, 1: 320, 2: 128} if step > 2 else {0: 512},
            tokens={0: 500, 1: 1900, 2: 672} if step > 2 else {0: 3072},
            groups_dropped=0,
        ),
        "policy": Policy(
            loss=-0.002,
            clip_fraction=0.02,
            approx_kl=0.001,
            ratio_mean=1.0,
            ratio_max=1.9,
            grad_norm=0.8,
            learning_rate=2e-4,
            updates=4,
        ),
        "lengths": Lengths(prompt_mean=10.0, prompt_max=10, response_mean=6.0, response_max=7),
        "finish_reasons": {"stop": 512},
        "records": Records(
            bytes=rows * row_bytes + 512 * 180,
            audit_bytes=8 * 16 * 360 if guides else 0,
            rows=rows,
            rows_missing=sum(missing.values()),
            missing_by_reason=missing,
            bytes_per_token=(row_bytes + 512 * 180 / rows) if rows else None,
            frames=512,
        ),
        "transport": Transport(
            capacity_bytes=2**25,
            held_bytes=2**21 + step,
            frames=800,
            frame_bytes=2**20,
            read_bytes={"ring": rows * 50, "http": rows * 8},
            read_seconds={"ring": 0.01, "http": 0.02},
            retries=int(step == 7),
            waits=int(step == 9),
        )
        if records
        else None,
        "routes_missing": 0,
        "mismatch": _mismatch(draw) if guides else (),
        "seconds": StepSeconds(total=total, **seconds),
        "overhead": Overhead(
            records=cost,
            capture=0.006 if records else 0.0,
            pack=0.007 if records else 0.0,
            put=0.005 if records else 0.0,
            fetch=fetch,
            unpack=unpack,
            guided_kernels=kernels,
            extra_forward=extra,
            critical_path=critical,
            ratio=(cost + kernels + extra) / critical,
        ),
        "restarts": 0 if step < 18 else 1,
    }
    return StepRecord(**{**values, **changes})


def _mismatch(draw: random.Random) -> tuple[SiteMismatch, ...]:
    sites = []
    for layer in range(4):
        for kind, values in (("ExpertInput", 96 * 400), ("Key", 32 * 400), ("Value", 32 * 400)):
            rtn = int(values * (0.006, 0.1, 0.2, 0.25)[layer] * draw.uniform(0.8, 1.2))
            guided = 0 if layer >= 2 else rtn
            sites.append(
                SiteMismatch(
                    layer=layer,
                    kind=kind,
                    rtn_values=values,
                    rtn_mismatched=rtn,
                    rtn_adjacent=int(rtn * 0.985),
                    guided_values=values,
                    guided_mismatched=guided,
                    guided_adjacent=guided,
                    scales=values // 16 if layer >= 2 else 0,
                    scales_wrong=0,
                )
            )
    return tuple(sites)


def make_start(
    method: str = "TRACE", *, seed: int = 1, steps: int = 40, resumed_from: int = 0
) -> StartRecord:
    return StartRecord(
        run_id=f"run-{seed}",
        time=START + resumed_from * 1.6,
        resumed_from=resumed_from,
        steps=steps,
        method=method,
        parameters=551_424,
        row_bytes=58 if method == "TRACE" else 8 if method != "BF16" else 0,
        whole_row_bytes=360 if method != "BF16" else 0,
        warmup_steps=285,
        warmup_seconds=44.0,
        held_out_reward=0.55,
    )


def make_finish(
    method: str = "TRACE", *, step: int = 40, seed: int = 1, failed: bool = False
) -> FinishRecord:
    guides = method == "TRACE"
    return FinishRecord(
        run_id=f"run-{seed}",
        time=START + 12 + 1.6 * step,
        step=step,
        outcome="Failed" if failed else "Complete",
        reason="RecordsMissing" if failed else "Completed",
        message="12 % of the record rows of step 7 are missing; raise records.maxMissingRatio or look at the "
        "rollout's log"
        if failed
        else "All steps are done.",
        reward_first=0.56,
        reward_last=0.78,
        held_out_first=0.55,
        held_out_last=0.72,
        gap_guided_mean=GAPS[method],
        gap_unguided_mean=GAPS["QAT"] if guides else None,
        gap_ratio=GAPS["TRACE"] / GAPS["QAT"] if guides else None,
        overhead_ratio=0.203 if guides else 0.018,
        rows_missing=4,
        record_bytes_per_token=69.25,
        tokens_per_second=2310.0,
        expectations=(
            Expectation(name="maxGapRatio", wanted="at most 0.5", value=0.079, met=True),
            Expectation(name="maxOverhead", wanted="at most 0.25", value=0.203, met=True),
        )
        if guides
        else (),
    )


def write_run(
    directory: Path,
    method: str = "TRACE",
    *,
    seed: int = 1,
    steps: int = 40,
    done: int | None = None,
    end: str = "Complete",
) -> Path:
    """Write a run that did `done` steps; `end` is Complete, Failed, or "" for a run that was killed."""
    layout = RunLayout(directory)
    directory.mkdir(parents=True)
    ResolvedJob(
        job=job_of(method, name="canary", seed=seed, steps=steps),
        job_uid="00000000-0000-4000-8000-000000000000",
        run_dir=directory,
        cache_dir=directory / "cache",
        token_file=layout.token,
        endpoints=Endpoints(directory=layout.endpoints, rollout=[Endpoint(name="rollout-0")]),
    ).write(layout.job)
    last = steps if done is None else done
    with RunLog(directory, now=lambda: START) as log:
        log.progress("warming up", 285, 285, exact=0.54)
        log.write(make_start(method, seed=seed, steps=steps).model_dump(mode="json"))
        for step in range(1, last + 1):
            log.write(make_step(step, method, steps=steps, seed=seed).model_dump(mode="json"))
            if step == 18:
                log.write(
                    EventRecord(
                        run_id=f"run-{seed}",
                        time=START + 10 + 1.6 * step,
                        step=step,
                        reason="RolloutRestarted",
                        message="rollout-0 shows another instance; what was in flight is generated again.",
                    ).model_dump(mode="json")
                )
        if end:
            finish = make_finish(method, step=last, seed=seed, failed=end == "Failed")
            log.write(finish.model_dump(mode="json"))
    return directory


def main(target: Path) -> None:
    """Write sample runs and their reports under `target`."""
    single = write_run(target / "trace", steps=40)
    write_report([load_run(single)], target / "single.html")
    failed = write_run(target / "failed", done=7, end="Failed")
    write_report([load_run(failed)], target / "failed.html")
    empty = write_run(target / "empty", done=0, end="")
    write_report([load_run(empty)], target / "empty.html")
    several = [
        write_run(target / f"{method.lower()}-{seed}", method, seed=seed)
        for method in ("BF16", "QAT", "TRACE")
        for seed in (1, 2, 3)
    ]
    write_report([load_run(run) for run in several], target / "several.html")
    long = write_run(target / "long", steps=400)
    write_report([load_run(long)], target / "long.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
