"""What recording costs an SGLang rollout on a CPU: nanoseconds a recorded value, and its share of generation.

    .cache/engines/sglang/bin/python benchmarks/engines/sglang_cost.py [--quick] [--repeats N] [--out FILE]

A rollout answers batches of requests, each twice, with records and without, in turns; both prefill all of
their prompts and round the same values. Counted is the CPU time of the rollout's processes and of the record
store. `onAgainstOff` is the difference of a pair, divided by the one without records. `timed` is what the
plugin says of itself: it times capture (beyond the rounding that it does anyway), packing and putting in the
threads that do it; that is divided by the rest of the same batch. Figures are medians over pairs, with a
bootstrap's 95 % interval. Two rollouts, one that records and one that does not, would differ by more than
recording costs, from one start to the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/integration"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests/engines"))

from conftest import NODE, RUN, TOKEN, resolve, start

from tracerl.api.job import Spec
from tracerl.api.model import ModelShape
from tracerl.engines.client import RolloutClient, Sampling, push_from_disk
from tracerl.engines.hf import initial_weights
from tracerl.records.sites import SiteKind, site_table
from tracerl.runtime.bench import machine
from tracerl.transport.sources import open_source

RESULTS = Path(__file__).parents[1] / "results/engines-sglang-cost.json"


class Rollout:
    """One rollout and its store, with the CPU time that they have used."""

    def __init__(self, directory: Path, model: Path, shape: ModelShape, tokens: int) -> None:
        spec = Spec.model_validate(
            {
                "model": {"uri": f"file://{model}", "dtype": "BFloat16"},
                "task": {"name": "builtin/chain_sum"},
                "algorithm": {
                    "steps": 1,
                    "promptsPerStep": 1,
                    "samplesPerPrompt": 2,
                    "maxPromptTokens": 64,
                    "maxResponseTokens": tokens,
                },
                "method": {"name": "TRACE"},
                "rollout": {"engine": "SGLang", "kvCacheTokens": 8192, "maxRunningRequests": 64},
            }
        )
        self.table = site_table(shape, spec)
        self.resolved = resolve(directory, spec)
        self.store = start(self.resolved, "store_main", "store-0")
        self.store.wait_until_it_listens()
        self.server = start(self.resolved, "rollout_main", "rollout-0")
        self.url = self.server.wait_until_it_listens().url
        self.source = open_source(self.resolved, RUN, NODE, starts_run=True)
        server = psutil.Process(self.server.process.pid)
        self.processes = [
            server,
            *server.children(recursive=True),
            psutil.Process(self.store.process.pid),
        ]

    def cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        self.source.close()
        self.server.end()
        self.store.end()


async def turn(
    rollout: Rollout, prompts: list[list[int]], tokens: int, name: str, *, record: bool
) -> tuple[float, float]:
    """CPU seconds of one batch, and what the plugin says that recording it took."""
    async with RolloutClient(rollout.url, TOKEN, run_id=RUN) as client:
        before = rollout.cpu_seconds()
        done = await client.generate_batch(
            prompts,
            [Sampling(tokens, 1.0, seed=index) for index in range(len(prompts))],
            ids=[f"{name}-{record}-{index}" for index in range(len(prompts))],
            record=record,
        )
        rollout.source.release([entry.handle for one in done for entry in one.records])
        took = rollout.cpu_seconds() - before
        assert all(len(one.tokens) == tokens for one in done)
        return took, sum(sum(one.seconds.values()) for one in done)


def middle(values: list[float]) -> dict[str, float]:
    """Median and its 95 % interval, a bootstrap."""
    generator = random.Random(1)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(2000))
    return {"median": statistics.median(values), "low": medians[50], "high": medians[1949]}


def figures(pairs: list[tuple[float, float]], values: int) -> dict[str, dict[str, float]]:
    """What recording costs, of pairs (seconds of recording, seconds without)."""
    return {
        "nanosecondsPerValue": middle([1e9 * cost / values for cost, _ in pairs]),
        "share": middle([cost / rest for cost, rest in pairs]),
    }


async def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    shape = ModelShape.uniform(
        4, hidden=args.hidden, heads=16, kv_heads=4, head_dim=64, experts=8, top_k=2,
        expert_hidden=args.hidden // 2, vocab=512, context=512,
    )  # fmt: skip
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape.to_hf_config()))
    weights = {name: tensor.bfloat16() for name, tensor in initial_weights(shape, 1)}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    tokens, generator = args.tokens, torch.Generator().manual_seed(1)
    rollout = Rollout(directory / "run", model, shape, tokens)
    timed: list[tuple[float, float]] = []
    differences: list[tuple[float, float]] = []
    try:
        async with RolloutClient(rollout.url, TOKEN, run_id=RUN) as client:
            await client.connect()
            await push_from_disk([client], str(model), 0)
        for repeat in range(args.repeats + 1):
            # New prompts: cached ones would cost nothing.
            prompts = torch.randint(0, 512, (args.sequences, 32), generator=generator).tolist()
            taken = {
                record: await turn(rollout, prompts, tokens, f"batch-{repeat}", record=record)
                for record in ((True, False) if repeat % 2 else (False, True))
            }
            if repeat:  # the first warms up
                (took, recording), (bare, _) = taken[True], taken[False]
                timed.append((recording, took - recording))
                differences.append((took - bare, bare))
    finally:
        rollout.close()
    table = rollout.table
    rows = args.sequences * (32 + tokens - 1)
    values = rows * sum(site.dim for site in table.sites if site.kind is not SiteKind.ROUTES)
    return {
        "machine": machine(["sglang", "torch"]) | {"loadAverage": os.getloadavg()},
        "hidden": args.hidden,
        "layers": shape.layers,
        "sequences": args.sequences,
        "tokens": tokens,
        "repeats": args.repeats,
        "recordedValuesPerBatch": values,
        "recordBytesPerToken": table.row_bytes,
        "batchSeconds": {
            "on": middle([sum(one) for one in timed]),
            "off": middle([b for _, b in differences]),
        },
        "onAgainstOff": figures(differences, values),
        "timed": figures(timed, values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three repeats of a narrow model")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.hidden, args.repeats = 256, 3
    with tempfile.TemporaryDirectory(prefix="sglang-cost-") as directory:
        result = asyncio.run(measure(Path(directory), args))
    text = json.dumps(result, indent=2)
    print(text)
    args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
