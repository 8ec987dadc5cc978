"""BF16, QAT and TRACE on one GPU, in the settings of earlier figures: a resumable comparison.

    python benchmarks/gpu/compare.py run --out RUNS.jsonl [--device cuda] [--workers N] [--budget SECONDS]
    python benchmarks/gpu/compare.py summarise --out RUNS.jsonl [--result FILE]

A run is rollout and trainer of the reference engine in one process, on policy. `equal` runs are one step from
the same warm-up, of which the gap counts; `rl` runs train. Several run side by side, each in a process of its
own: models this small leave a GPU idle. Every finished run is a line of RUNS.jsonl and is not run again; one
that the budget stopped goes on at its last step, as long as the directory beside RUNS.jsonl is there.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "ratio")]

RESULTS = Path(__file__).parents[1] / "results/gpu-h200-compare.json"

BASE: dict[str, Any] = {
    "apiVersion": "tracerl.dev/v1alpha1",
    "kind": "TraceRLJob",
    "metadata": {"name": "gpu-compare"},
    "spec": {
        "model": {},
        "warmup": {"answerNoise": "0.2"},
        "task": {"name": "builtin/chain_sum", "answerFormat": "Reversed", "heldOutPrompts": 512},
        "algorithm": {
            "promptsPerStep": 64,
            "samplesPerPrompt": 8,
            "maxPromptTokens": 32,
            "maxResponseTokens": 8,
            "evaluation": {"temperature": "1"},
        },
        "quantization": {"secondInput": "BF16"},
        "trainer": {"optimizer": {"warmupSteps": 5}, "microBatchTokens": 65536},
        "transport": {"onlyObject": True},
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "deep": {
        "model": "builtin://tiny-moe-deep",
        "digits": 2,
        "warmup": {"steps": 450, "learningRate": "0.003"},
        "rates": ["0.0003"],
        "steps": 80,
    },
    "wide": {
        "model": "builtin://small-moe",
        "digits": 2,
        "warmup": {"steps": 400, "learningRate": "0.003"},
        "rates": ["0.0003"],
        "steps": 80,
    },
}
"""`wide`: 14 M parameters, 8 layers, 16 experts top-4. `deep`: 7 M, 16 layers, 16 experts top-2.

Sums of two digits: a warm-up on the three and four of the earlier figures would take most of the time."""


def trace(code_bits: int, scale_bits: int, layers: str) -> dict[str, Any]:
    """Make a TRACE method."""
    return {
        "name": "TRACE",
        "trace": {"codeBits": code_bits, "scaleBits": scale_bits, "layers": {"policy": layers}},
    }


ARMS: dict[str, dict[str, Any]] = {
    "BF16": {"name": "BF16"},
    "Vanilla": {"name": "Vanilla"},
    "QAT": {"name": "QAT"},
    "TRACE whole, all": trace(4, 8, "All"),
    "TRACE 1 bit, all": trace(1, 3, "All"),
    "TRACE whole, half": trace(4, 8, "LastHalf"),
    "TRACE 1 bit, half": trace(1, 3, "LastHalf"),
}
EVIDENCE: dict[str, dict[str, float]] = {
    "wide": {
        "BF16": 0.0011,
        "Vanilla": 0.0206,
        "QAT": 0.0142,
        "TRACE whole, all": 0.00033,
        "TRACE 1 bit, all": 0.00033,
        "TRACE whole, half": 0.0019,
        "TRACE 1 bit, half": 0.0024,
    },
    "deep": {
        "BF16": 0.0037,
        "Vanilla": 0.0545,
        "QAT": 0.0332,
        "TRACE whole, all": 0.00088,
        "TRACE 1 bit, all": 0.00088,
        "TRACE 1 bit, half": 0.0083,
    },
}
"""Gaps at equal weights as a prototype had them, one seed, on the same kind of GPU."""
EVIDENCE_RL: dict[str, list[float]] = {
    "BF16": [0.61, 0.78, 0.88, 0.92, 0.92, 0.92, 0.94, 0.94],
    "QAT": [0.58, 0.76, 0.83, 0.90, 0.91, 0.92, 0.90, 0.88],
    "TRACE 1 bit, half": [0.60, 0.79, 0.86, 0.90, 0.90, 0.92, 0.93, 0.92],
    "TRACE whole, all": [0.82, 0.90, 0.94, 0.95, 0.96, 0.94, 0.94, 0.95],
}
"""Reward in eighths of 200 steps of `deep` at .00015 there; each arm had a warm-up of its own."""


def job(setting: str, arm: str, seed: int, **algorithm: Any) -> dict[str, Any]:
    """Make the manifest of one run; weights and data depend on the seed, the warm-up not on the arm."""
    document = copy.deepcopy(BASE)
    spec, known = document["spec"], SETTINGS[setting]
    spec["model"]["uri"] = known["model"]
    spec["warmup"] |= known["warmup"] | {"seed": seed}
    digits = known["digits"]
    spec["task"]["parameters"] = {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": digits,
        "max_digits": digits,
    }
    spec["algorithm"] |= {"seed": seed} | algorithm
    spec["method"] = ARMS[arm]
    return document


def equal_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """List one step from equal weights of every arm, of 1,024 trajectories; the first seed's are audited."""
    runs = []
    for seed in seeds:
        for setting in SETTINGS:
            for arm in ARMS:
                document = job(setting, arm, seed, steps=1, promptsPerStep=256, samplesPerPrompt=4)
                document["spec"]["rollout"] = {"maxRunningRequests": 1024, "kvCacheTokens": 65_536}
                if seed == seeds[0] and arm in {"QAT", "TRACE whole, all"}:
                    document["spec"]["records"] = {"auditEvery": 1}
                runs.append(entry("equal", setting, arm, seed, document))
    return runs


def rl_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """List RL runs, seeds outermost, so that a comparison cut short has whole seeds."""
    ways = [(number, name, rate) for name in SETTINGS for number, rate in enumerate(SETTINGS[name]["rates"])]
    runs = []
    for seed in seeds:
        for _, setting, rate in sorted(ways):
            for arm in ARMS:
                if arm == "Vanilla":
                    continue
                document = job(setting, arm, seed, steps=SETTINGS[setting]["steps"])
                document["spec"]["trainer"]["optimizer"]["learningRate"] = rate
                runs.append(entry("rl", setting, arm, seed, document))
    return runs


def entry(kind: str, setting: str, arm: str, seed: int, document: dict[str, Any]) -> dict[str, Any]:
    """Describe one run by what tells it from the others; the learning rate counts where it trains."""
    rate = document["spec"]["trainer"]["optimizer"].get("learningRate")
    name = "-".join(part for part in (kind, setting, rate, arm, f"seed{seed}") if part)
    return {
        "name": name.replace(" ", "_").replace(",", ""),
        "kind": kind,
        "setting": setting,
        "arm": arm,
        "seed": seed,
        "rate": rate,
        "job": document,
    }


# -- one process ------------------------------------------------------------------------------------------


def prepare(gpus: multiprocessing.Queue[str]) -> None:
    """Start a worker on the GPU that is its turn: one CPU thread, the rest is the GPU's."""
    # Before CUDA starts in this process: a device that is set holds for one of its threads alone.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()
    import torch

    torch.set_num_threads(1)


def warm(document: dict[str, Any], place: Path, device: str) -> float:
    """Fill the warm-up cache for a job; returns seconds."""
    import lagged

    from tracerl.api.job import TraceRLJob

    started = time.perf_counter()
    lagged.warm(TraceRLJob.model_validate(document), place / "cache", device)
    return time.perf_counter() - started


def one(run: dict[str, Any], place: Path, device: str, deadline: float) -> dict[str, Any] | None:
    """Do one run, or go on with it; None when the deadline (`time.time`) came before its end."""
    try:
        return asyncio.run(_one(run, place, device, deadline))
    except Exception:
        # An error of another process arrives without its place.
        print(f"{run['name']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise


async def _one(run: dict[str, Any], place: Path, device: str, deadline: float) -> dict[str, Any] | None:
    import lagged

    from tracerl.api.job import TraceRLJob
    from tracerl.rl.checkpoint import Checkpoints
    from tracerl.rl.train import Timer

    started = time.perf_counter()
    document = TraceRLJob.model_validate(run["job"])
    steps, prompts = document.spec.algorithm.steps, document.spec.algorithm.prompts_per_step
    checkpoints = Checkpoints(place / run["name"], keep=1)
    parts = lagged.OneProcessJob(document, run["name"], place / "cache", device)
    kept: dict[str, Any] = {"steps": [], "seconds": 0.0}
    try:
        found = checkpoints.load(print)
        if found is not None:
            parts.trainer.load_state(found.tensors)
            kept = found.loop
        for step in range(len(kept["steps"]), steps):
            if time.time() > deadline:
                kept["seconds"] += time.perf_counter() - started
                checkpoints.save(step, parts.trainer.state(), kept | {"step": step})
                return None
            await parts.rollout.use(step, parts.weights())
            if step == 0:
                kept["heldOutStart"] = await parts.generator.evaluate(parts.task.held_out, step)
            groups = await parts.generator.groups(range(step * prompts, (step + 1) * prompts))
            outcome = parts.learner.step(groups, step, Timer())
            await parts.generator.release(groups)
            kept["steps"].append(lagged.step_figures(outcome) | mismatch(outcome.engine.sites))
        if run["kind"] == "rl":
            await parts.rollout.use(steps, parts.weights())
            kept["heldOutEnd"] = await parts.generator.evaluate(parts.task.held_out, steps)
    finally:
        parts.close()
    kept["seconds"] += time.perf_counter() - started
    return {key: run[key] for key in ("name", "kind", "setting", "arm", "seed", "rate")} | kept


def mismatch(sites: dict[tuple[int, str], Any]) -> dict[str, Any]:
    """Shares of codes that differ by layer, over the audited sites of each; nothing where none is audited."""
    layers: dict[int, list[Any]] = {}
    for (layer, _), counts in sites.items():
        layers.setdefault(layer, []).append(counts)
    if not layers:
        return {}

    def share(key: str, of: str) -> list[float]:
        return [
            sum(getattr(counts, key) for counts in layers[layer])
            / max(1, sum(getattr(counts, of) for counts in layers[layer]))
            for layer in sorted(layers)
        ]

    return {
        "mismatchRTN": share("rtn_mismatched", "values"),
        "mismatchGuided": share("guided_mismatched", "values"),
        "adjacentRTN": share("rtn_adjacent", "rtn_mismatched"),
        "scalesWrong": share("scales_wrong", "scales"),
    }


# -- all of them ------------------------------------------------------------------------------------------


def read_runs(out: Path) -> dict[str, dict[str, Any]]:
    """Read finished runs by name."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {run["name"]: run for run in map(json.loads, lines)}


def execute(runs: Sequence[dict[str, Any]], out: Path, *, workers: int, device: str, budget: float) -> None:
    """Do what is not done, `workers` runs at a time; stops between steps when the budget is spent."""
    deadline = time.time() + budget
    done = read_runs(out)
    todo = [run for run in runs if run["name"] not in done]
    print(f"{len(todo)} of {len(runs)} runs to do, {workers} at a time", flush=True)
    place = out.with_suffix("")
    place.mkdir(parents=True, exist_ok=True)
    about = machine(device)
    context = multiprocessing.get_context("spawn")
    turns = context.Queue()
    for _, gpu in zip(range(workers), itertools.cycle(visible_gpus()), strict=False):
        turns.put(gpu)
    with ProcessPoolExecutor(workers, context, prepare, (turns,)) as pool:
        # Runs that start from the same warm-up would all compute it.
        first = {(run["setting"], run["seed"]): run["job"] for run in todo}
        warming = {pool.submit(warm, document, place, device): key for key, document in first.items()}
        for future in as_completed(warming):
            print(f"warm-up of {warming[future]}: {future.result():.1f} s", flush=True)
        running = [pool.submit(one, run, place, device, deadline) for run in todo]
        keep(as_completed(running), out, about)


def visible_gpus() -> list[str]:
    """GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; an empty name where there is none."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (named.split(",") if named else [str(number) for number in range(count)])[:count] or [""]


def keep(finished: Iterable[Future[dict[str, Any] | None]], out: Path, about: dict[str, Any]) -> None:
    """Append results as they come; one that failed has said why."""
    for future in finished:
        if future.exception() is not None or (result := future.result()) is None:
            continue
        with out.open("a") as file:
            file.write(json.dumps(result | {"machine": about}) + "\n")
        last = result["steps"][-1]
        print(
            f"{result['name']}: gap {last['gapGuided']:.5f}, reward {last['reward']:.3f}, "
            f"{len(result['steps'])} steps in {result['seconds']:.0f} s",
            flush=True,
        )


def machine(device: str) -> dict[str, Any]:
    """Describe where this runs."""
    import torch

    about: dict[str, Any] = {"cores": os.cpu_count(), "torch": torch.__version__}
    if device.startswith("cuda"):
        about |= {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}
    return about


def eighths(values: Sequence[float]) -> list[float]:
    """Means of eight equal parts."""
    cut = [len(values) * part // 8 for part in range(9)]
    return [round(statistics.fmean(values[a:b]), 4) for a, b in itertools.pairwise(cut) if a < b]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, lowest and highest over seeds."""
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values), "seeds": len(values)}


def summarise(out: Path) -> dict[str, Any]:
    """Collect all runs: gaps at equal weights with the earlier figures beside them, and curves of RL."""
    found: dict[tuple[str, str, str | None, str], list[dict[str, Any]]] = {}
    for run in read_runs(out).values():
        found.setdefault((run["kind"], run["setting"], run["rate"], run["arm"]), []).append(run)
    equal, rl = [], []
    order = list(ARMS)
    for (kind, setting, rate, arm), runs in sorted(
        found.items(), key=lambda item: (item[0][1], item[0][2] or "", order.index(item[0][3]))
    ):
        steps = [run["steps"] for run in runs]
        row: dict[str, Any] = {"setting": setting, "arm": arm}
        row["missingRows"] = sum(step["missing"] for run in steps for step in run)
        if kind == "equal":
            row["heldOutStart"] = spread([run["heldOutStart"] for run in runs])
            row["gap"] = spread([run[0]["gapGuided"] for run in steps])
            row["gapUnguided"] = spread([run[0]["gapUnguided"] for run in steps])
            row["gapBefore"] = EVIDENCE[setting].get(arm)
            for key in ("mismatchRTN", "mismatchGuided", "adjacentRTN", "scalesWrong"):
                if audited := [run[0][key] for run in steps if key in run[0]]:
                    row[key] = [statistics.fmean(layer) for layer in zip(*audited, strict=True)]
            equal.append(row)
        else:
            row |= {"learningRate": rate, "steps": max(map(len, steps))}
            for key in ("seed", "heldOutStart", "heldOutEnd"):
                row[key] = [run[key] for run in runs]
            row["rewardEighths"] = [eighths([step["reward"] for step in run]) for run in steps]
            row["gapEighths"] = [eighths([step["gapGuided"] for step in run]) for run in steps]
            row["rewardEighthsBefore"] = (
                EVIDENCE_RL.get(arm) if (setting, rate) == ("deep", "0.00015") else None
            )
            row["secondsPerStep"] = statistics.fmean(run["seconds"] / len(run["steps"]) for run in runs)
            rl.append(row)
    machines = {json.dumps(run["machine"]) for runs in found.values() for run in runs}
    return {
        "machines": [json.loads(text) for text in sorted(machines)],
        "settings": SETTINGS,
        "job": BASE["spec"],
        "equal": equal,
        "rl": rl,
    }


def table(summary: dict[str, Any]) -> str:
    """Both tables as markdown."""
    lines = [
        "| setting | arm | seeds | gap at equal weights | unguided | before |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in summary["equal"]:
        gap, before = row["gap"], row["gapBefore"]
        lines.append(
            f"| {row['setting']} | {row['arm']} | {gap['seeds']} "
            f"| {gap['mean']:.5f} ({gap['low']:.5f}–{gap['high']:.5f}) | {row['gapUnguided']['mean']:.5f} "
            f"| {'' if before is None else format(before, '.5f')} |"
        )
    lines += [
        "",
        "| setting | learning rate | seed | arm | held-out reward | reward in eighths | gap in eighths |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [(row, index) for row in summary["rl"] for index in range(len(row["seed"]))]
    for row, index in sorted(
        rows, key=lambda one: (one[0]["setting"], one[0]["learningRate"], one[0]["seed"][one[1]])
    ):
        lines.append(
            f"| {row['setting']} | {row['learningRate']} | {row['seed'][index]} | {row['arm']} "
            f"| {row['heldOutStart'][index]:.3f} → {row['heldOutEnd'][index]:.3f} "
            f"| {' '.join(f'{reward:.2f}' for reward in row['rewardEighths'][index])} "
            f"| {' '.join(f'{gap:.4f}' for gap in row['gapEighths'][index])} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "summarise"])
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-compare.jsonl"), help="finished runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=8, help="runs side by side")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; a run then stops after its step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="runs whose name holds this text")
    parser.add_argument("--result", type=Path, default=RESULTS, help="summarise: write the JSON here")
    arguments = parser.parse_args()
    if arguments.command == "run":
        import torch

        if arguments.device.startswith("cuda") and not torch.cuda.is_available():
            sys.exit(
                "benchmarks/gpu/compare.py: PyTorch sees no GPU here; give --device cpu, or run it elsewhere"
            )
        seeds = range(1, arguments.seeds + 1)
        wanted = [run for run in equal_runs(seeds) + rl_runs(seeds) if arguments.only in run["name"]]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        how = {"workers": arguments.workers, "device": arguments.device, "budget": arguments.budget}
        execute(wanted, arguments.out, **how)
    summary = summarise(arguments.out)
    if arguments.command == "summarise":
        if not read_runs(arguments.out):
            sys.exit(
                f"benchmarks/gpu/compare.py: {arguments.out} holds no runs; make some, or give another --out"
            )
        arguments.result.write_text(json.dumps(summary, indent=1) + "\n")
    print(table(summary))


if __name__ == "__main__":
    main()
