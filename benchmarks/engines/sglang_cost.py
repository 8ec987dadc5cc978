"""What recording costs an SGLang rollout on a CPU: nanoseconds a recorded value, and its share of generation.

    .cache/engines/sglang/bin/python benchmarks/engines/sglang_cost.py [--quick] [--repeats N] [--out FILE]

A rollout answers batches of requests, each twice, with records and without, in turns; both prefill all of
their prompts. Two figures come of it, in CPU time of the scheduler's process and of the record store. The
plugin times capture (beyond the rounding that it does anyway), packing and putting in the threads that do it;
that is divided by the rest of the same batch. And the difference between the two of a pair is divided by the
one without records. Intervals are a bootstrap over batches and pairs. Two processes, one that records and one
that does not, would differ by more than recording costs, from one start to the next.
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
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        [self.scheduler] = [child for child in children if "scheduler" in " ".join(child.cmdline())]

    def cpu_seconds(self) -> float:
        times = [self.scheduler.cpu_times(), psutil.Process(self.store.process.pid).cpu_times()]
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


def interval(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """95 % interval of sum(a) / sum(b), a bootstrap over repeats."""
    generator = random.Random(1)
    ratios = sorted(
        sum(a for a, _ in drawn) / sum(b for _, b in drawn)
        for drawn in (generator.choices(pairs, k=len(pairs)) for _ in range(2000))
    )
    return ratios[50], ratios[1949]


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
    batches: list[tuple[float, float]] = []
    pairs: list[tuple[float, float]] = []
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
                batches.append((recording, took - recording))
                pairs.append((took - bare, bare))
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
        "generatingSecondsPerBatch": statistics.mean(rest for _, rest in batches),
        "recordingSecondsPerBatch": statistics.mean(recording for recording, _ in batches),
        "nanosecondsPerValue": 1e9 * statistics.mean(recording for recording, _ in batches) / values,
        "nanosecondsPerValueInterval": interval([(1e9 * recording, values) for recording, _ in batches]),
        "share": sum(recording for recording, _ in batches) / sum(rest for _, rest in batches),
        "shareInterval": interval(batches),
        "differenceShare": sum(more for more, _ in pairs) / sum(bare for _, bare in pairs),
        "differenceShareInterval": interval(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three repeats of a narrow model")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=12)
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
