"""Which `method.trace` defaults lose least when records are stale: a resumable study on the tiny MoE.

    python benchmarks/ratio/study.py pilot --out DIR      which learning rate makes which drift
    python benchmarks/ratio/study.py screen --out DIR     two seeds of every arm
    python benchmarks/ratio/study.py final --out DIR      more seeds of the arms that matter
    python benchmarks/ratio/study.py summarise --out DIR  the table, as JSON and markdown

Every run is one process of one thread and one file of DIR; what has a file is not run again, so a study may
be stopped and continued, and its parts run on different machines.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS = 60
LAG = 3
# Learning rates. How much drift each makes is measured, not assumed: `klOverVersions` of the BF16 arm.
DRIFTS = {"strong": "0.0002", "realistic": "0.00005"}

JOB: dict[str, Any] = {
    "apiVersion": "tracerl.dev/v1alpha1",
    "kind": "TraceRLJob",
    "metadata": {"name": "ratio-study"},
    "spec": {
        "model": {"uri": "builtin://tiny-moe"},
        "warmup": {"steps": 350, "answerNoise": "0.2", "learningRate": "0.004", "seed": 2},
        "task": {
            "name": "builtin/chain_sum",
            "parameters": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
            "answerFormat": "Reversed",
            "heldOutPrompts": 512,
        },
        "algorithm": {
            "steps": STEPS,
            "promptsPerStep": 32,
            "samplesPerPrompt": 8,
            "miniBatches": 2,
            "maxPromptTokens": 32,
            "maxResponseTokens": 8,
            "maxVersionDiff": LAG,
            "evaluation": {"temperature": "1"},
        },
        "trainer": {"optimizer": {"warmupSteps": 10}},
        "transport": {"onlyObject": True},
    },
}


def trace(**settings: Any) -> dict[str, Any]:
    """Make a TRACE method: one code bit, three scale bits."""
    return {"name": "TRACE", "trace": {"codeBits": 1, "scaleBits": 3, **settings}}


HALF, ALL = {"policy": "LastHalf"}, {"policy": "All"}
ARMS: dict[str, dict[str, Any]] = {
    "BF16": {"name": "BF16"},
    "QAT": {"name": "QAT"},
    **{
        f"TRACE {layers_name} {ratio} {band_name}": trace(layers=layers, ratioFrom=ratio, driftBand=band)
        for layers_name, layers in (("half", HALF), ("all", ALL))
        for ratio in ("Guided", "Unguided")
        for band_name, band in (("no band", None), ("band .1", "0.1"))
    },
    "TRACE half Unguided band .05": trace(layers=HALF, ratioFrom="Unguided", driftBand="0.05"),
    "TRACE all Unguided band .05": trace(layers=ALL, ratioFrom="Unguided", driftBand="0.05"),
}
"""Every trajectory three versions old: there `Auto` and `Exact` are `Unguided`, and "only diff 0" is QAT."""

MIXED_ARMS: dict[str, dict[str, Any]] = {
    "BF16": {"name": "BF16"},
    "QAT": {"name": "QAT"},
    **{
        f"TRACE {layers_name} {ratio} no band": trace(layers=layers, ratioFrom=ratio)
        for layers_name, layers in (("half", HALF), ("all", ALL))
        for ratio in ("Guided", "Unguided", "Auto", "Exact")
    },
    "TRACE half Auto band .1": trace(layers=HALF, ratioFrom="Auto", driftBand="0.1"),
    "TRACE all Auto band .1": trace(layers=ALL, ratioFrom="Auto", driftBand="0.1"),
    "TRACE half only diff 0": trace(layers=HALF, ratioFrom="Auto", maxGuidedVersionDiff=0),
    "TRACE all only diff 0": trace(layers=ALL, ratioFrom="Auto", maxGuidedVersionDiff=0),
}


def job(method: dict[str, Any], learning_rate: str, seed: int) -> dict[str, Any]:
    """Make the manifest of one run."""
    document = copy.deepcopy(JOB)
    document["spec"]["method"] = method
    document["spec"]["algorithm"]["seed"] = seed
    document["spec"]["trainer"]["optimizer"]["learningRate"] = learning_rate
    return document


def one(document: dict[str, Any], lags: list[int], evaluate: int, cache: Path) -> dict[str, Any]:
    """Run one arm in this process."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    import lagged

    from tracerl.api.job import TraceRLJob

    parsed = TraceRLJob.model_validate(document)
    if evaluate == 0:
        lagged.warm(parsed, cache)
        return {}
    return lagged.run(parsed, lags, evaluate=evaluate, cache=cache)


def runs(arms: dict[str, dict[str, Any]], drifts: list[str], seeds: range, mode: str) -> list[dict[str, Any]]:
    """List runs, seeds outermost, so that a study cut short has whole seeds."""
    lags = {"stale": [LAG], "mixed": [0, LAG], "fresh": [0]}[mode]
    return [
        {
            "name": f"{mode}-{drift}-{arm}-seed{seed}".replace(" ", "_"),
            "mode": mode,
            "arm": arm,
            "drift": drift,
            "seed": seed,
            "lags": lags,
            "job": job(method, DRIFTS.get(drift, drift), seed),
        }
        for seed in seeds
        for drift in drifts
        for arm, method in arms.items()
    ]


def execute(wanted: list[dict[str, Any]], out: Path, workers: int, deadline: float) -> None:
    """Run what has no result yet, `workers` at a time; starts nothing after the deadline."""
    out.mkdir(parents=True, exist_ok=True)
    cache = out / "warmup-cache"
    todo = [entry for entry in wanted if not (out / f"{entry['name']}.json").exists()]
    print(f"{len(todo)} of {len(wanted)} runs to do, {workers} at a time", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def start(entry: dict[str, Any], evaluate: int) -> None:
        if time.monotonic() > deadline:
            return
        request = {"job": entry["job"], "lags": entry["lags"], "evaluate": evaluate, "cache": str(cache)}
        done = subprocess.run(
            [sys.executable, __file__, "one"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
        if done.returncode != 0:
            print(f"{entry['name']} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return
        if evaluate:
            result = {key: entry[key] for key in ("name", "mode", "arm", "drift", "seed", "lags")}
            result |= {"machine": machine()} | json.loads(done.stdout.splitlines()[-1])
            partial = out / f"{entry['name']}.tmp"
            partial.write_text(json.dumps(result))
            partial.rename(out / f"{entry['name']}.json")
            print(f"{entry['name']}: {result['heldOutStart']:.3f} -> {result['heldOutEnd']:.3f}", flush=True)

    with ThreadPoolExecutor(workers) as pool:
        seeds = {entry["seed"]: entry for entry in todo}
        list(pool.map(lambda entry: start(entry, 0), seeds.values()))
        list(pool.map(lambda entry: start(entry, 512), todo))


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval by Student's t (values: one a seed)."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 10: 2.26, 12: 2.20}
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, float("inf")
    factor = t.get(len(values), 2.1)
    return mean, factor * statistics.stdev(values) / len(values) ** 0.5


def summarise(out: Path) -> dict[str, Any]:
    """Collect all results of a directory into one table."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(out.glob("*-seed*.json")):
        result = json.loads(path.read_text())
        found.setdefault((result["mode"], result["drift"], result["arm"]), []).append(result)
    rows = []
    for (mode, drift, arm), results in found.items():
        tail = [[step["reward"] for step in result["steps"][-10:]] for result in results]
        reward, reward_half = interval([statistics.fmean(part) for part in tail])
        held, held_half = interval([result["heldOutEnd"] for result in results])
        gain, gain_half = interval([r["heldOutEnd"] - r["heldOutStart"] for r in results])

        def mean(key: str, results: list[dict[str, Any]] = results) -> float:
            return statistics.fmean(step[key] for result in results for step in result["steps"][LAG:])

        rows.append(
            {
                "mode": mode,
                "drift": drift,
                "arm": arm,
                "seeds": len(results),
                "rewardLastTen": [round(reward, 4), round(reward_half, 4)],
                "heldOutEnd": [round(held, 4), round(held_half, 4)],
                "heldOutGain": [round(gain, 4), round(gain_half, 4)],
                "gapGuided": round(mean("gapGuided"), 5),
                "gapUnguided": round(mean("gapUnguided"), 5),
                "klOverVersions": round(mean("k3Kl"), 6),
                "missingRows": sum(step["missing"] for r in results for step in r["steps"]),
            }
        )
    rows.sort(key=lambda row: (row["mode"], row["drift"], -row["rewardLastTen"][0]))
    machines = {json.dumps(run["machine"]) for results in found.values() for run in results}
    return {
        "machines": [json.loads(text) for text in sorted(machines)],
        "steps": STEPS,
        "lag": LAG,
        "learningRates": DRIFTS,
        "job": JOB["spec"],
        "arms": rows,
    }


def machine() -> dict[str, Any]:
    """Describe where this ran."""
    import torch

    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":")[1].strip()
            break
    python = platform.python_version()
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__, "python": python}


def table(summary: dict[str, Any]) -> str:
    """The arms as markdown."""
    lines = [
        "| mode | drift | arm | seeds | reward, last ten steps | held-out gain | gap guided | gap unguided "
        "| k3 KL |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['mode']} | {row['drift']} | {row['arm']} | {row['seeds']} "
        f"| {row['rewardLastTen'][0]:.3f} ± {row['rewardLastTen'][1]:.3f} "
        f"| {row['heldOutGain'][0]:+.3f} ± {row['heldOutGain'][1]:.3f} "
        f"| {row['gapGuided']:.4f} | {row['gapUnguided']:.4f} | {row['klOverVersions']:.5f} |"
        for row in summary["arms"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["one", "pilot", "screen", "final", "summarise"])
    parser.add_argument("--out", type=Path, default=Path("runs/ratio-study"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after this time")
    parser.add_argument("--result", type=Path, help="summarise: write the JSON here")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.command == "one":
        request = json.load(sys.stdin)
        result = one(request["job"], request["lags"], request["evaluate"], Path(request["cache"]))
        print(json.dumps(result))
    elif arguments.command == "summarise":
        summary = summarise(arguments.out)
        if arguments.result:
            arguments.result.write_text(json.dumps(summary, indent=1) + "\n")
        print(table(summary))
    elif arguments.command == "pilot":
        # Which learning rate makes which drift, and what staleness alone does.
        rates = ["0.00004", "0.00008", "0.00015", "0.0003", "0.0006"]
        two_arms = {"BF16": ARMS["BF16"], "TRACE half Unguided no band": ARMS["TRACE half Unguided no band"]}
        wanted = [run for mode in ("fresh", "stale") for run in runs(two_arms, rates, range(1, 4), mode)]
        execute(wanted, arguments.out, arguments.workers, deadline)
    else:
        seeds = range(1, 3) if arguments.command == "screen" else range(1, 7)
        drifts = list(DRIFTS)
        wanted = runs(ARMS, drifts, seeds, "stale") + runs(MIXED_ARMS, drifts, seeds, "mixed")
        execute(wanted, arguments.out, arguments.workers, deadline)


if __name__ == "__main__":
    main()
