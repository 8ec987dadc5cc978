"""The asynchronous loop, run by trainer rank 0: generate, train, push weights, report, checkpoint.

Generation, records and HTTP live in the event loop; the engine computes in one thread of its own. Version v
are the weights after v steps; step s (from 1) trains version s - 1 and makes version s.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from tracerl.api.constants import Reason
from tracerl.api.errors import InputError, JobError, TraceRLError
from tracerl.api.job import CheckpointState
from tracerl.api.resolved import ResolvedJob
from tracerl.engines.base import RecordCounts, TrainerEngine
from tracerl.engines.client import RolloutError
from tracerl.engines.hf import write_model
from tracerl.methods import plan
from tracerl.records.sites import audit_table, site_table
from tracerl.rl.account import StepContext, Totals, broken, expectations, step_record, transport_of
from tracerl.rl.baseline import Pair
from tracerl.rl.checkpoint import Checkpoints, measure_all
from tracerl.rl.dealing import units_of
from tracerl.rl.generation import Batches, Generator, encode_prompt
from tracerl.rl.loading import LEADER, NoRecords, RecordLoader, open_loader
from tracerl.rl.parallel import LeadingEngine
from tracerl.rl.rollouts import Rollouts, open_rollouts
from tracerl.rl.steprecord import EventRecord, FinishRecord, StartRecord
from tracerl.rl.tasks import Task, load_task
from tracerl.rl.tokenizer import Tokenizer, load_tokenizer
from tracerl.rl.train import Group, Learner, Timer
from tracerl.rl.warmup import WarmupResult, warm_up
from tracerl.transport.base import FrameSource
from tracerl.transport.places import s3_options

T = TypeVar("T")


class Log(Protocol):
    """Where the loop reports; `tracerl.observe.RunLog` is one."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take a record of `tracerl.rl.steprecord` as plain JSON values."""
        ...

    def progress(self, stage: str, done: int, total: int, **values: float) -> None:
        """Take how far something that is not a step has come."""
        ...

    def sync(self) -> None:
        """Return when everything written so far would survive a power cut."""
        ...

    def saved(self, step: int) -> None:
        """Take that the checkpoint of this step is there, whole."""
        ...


class StoppedError(TraceRLError):
    """The loop was asked to stop; a checkpoint holds every step that it did, if it did any."""


class LoopState(BaseModel):
    """What a checkpoint holds beside the engine's tensors."""

    model_config = ConfigDict(extra="forbid")

    job_uid: str
    step: int = 0
    next_group: int = 0
    pending_groups: list[int] = []
    """Asked for, with staleness Drop, but not trained on."""
    run_ids: list[str] = []
    restarts: int = 0
    totals: Totals = Totals()


async def run_loop(
    resolved: ResolvedJob,
    engine: TrainerEngine,
    log: Log,
    *,
    asked_to_stop: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Run a job to its end, continuing from its newest whole checkpoint.

    Call it from the main thread. JobError says why the job failed, after the log got the same; a cancelled
    loop leaves the last checkpoint. `asked_to_stop` is called when there are steps to lose, and returns when
    the loop is to end early: it does so by StoppedError, after the step that it is in and a checkpoint.
    """
    run_id = secrets.token_hex(8)
    spec = resolved.job.spec
    tokenizer = load_tokenizer(spec.model)
    task = load_task(
        spec.task, order_seed=spec.algorithm.seed, scratch=resolved.run_dir, s3=s3_options(resolved)
    )
    trainer = ThreadPoolExecutor(1, "trainer")
    with open_loader(resolved, engine.shape, run_id, LEADER, engine.selections) as (loader, source):
        units = units_of(spec.trainer.parallelism)
        leading = LeadingEngine(
            engine,
            loader,
            run_id=run_id,
            nodes=[resolved.node(f"trainer-{rank}") for rank in range(len(units))],
            units=units,
            homes={store.name: store.node for store in resolved.endpoints.store},
        )
        loop = _Loop(
            resolved,
            leading,
            LeadingEngine(engine, NoRecords(), run_id=run_id),
            log,
            run_id=run_id,
            task=task,
            tokenizer=tokenizer,
            trainer=trainer,
            source=source,
            loader=loader if len(units) == 1 else None,
        )
        try:
            await loop.run(asked_to_stop)
            await loop.write_model()
        except StoppedError:
            leading.close()
            raise
        except JobError as error:
            loop.finish(error)
            raise
        else:
            loop.finish(None)
            # After a failure the other trainers need no word: they end when this process does.
            leading.close()
        finally:
            task.close()
            trainer.shutdown(wait=False, cancel_futures=True)


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to tell about when several tasks failed together: one for the user if there is one."""
    leaves = []
    for error in errors.exceptions:
        leaves.append(_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if isinstance(leaf, TraceRLError)), leaves[0])


class _Loop:
    def __init__(
        self,
        resolved: ResolvedJob,
        engine: LeadingEngine,
        bare: LeadingEngine,
        log: Log,
        *,
        run_id: str,
        task: Task,
        tokenizer: Tokenizer,
        trainer: ThreadPoolExecutor,
        source: FrameSource,
        loader: RecordLoader | None,
    ) -> None:
        self._resolved, self._spec = resolved, resolved.job.spec
        self._engine, self._bare, self._log = engine, bare, log
        self._run_id, self._task, self._tokenizer = run_id, task, tokenizer
        self._trainer = trainer
        self._source, self._loader = source, loader
        self._plan = plan(self._spec, engine.shape)
        self._table = site_table(engine.shape, self._spec)
        self._checkpoints = Checkpoints(resolved.layout.checkpoints, keep=self._spec.trainer.checkpoint.keep)
        self._sharded = self._spec.trainer.checkpoint.state is CheckpointState.SHARDED
        self._state = LoopState(job_uid=resolved.job_uid)
        self._saved = 0
        """Step of the newest checkpoint."""
        self._asked = asyncio.Event()
        """Set when the loop is to stop."""
        self._stepping = asyncio.Lock()
        """Held while weights and state are not of the same step."""
        self._beside: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup | None = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the loop, whose failure ends the loop and whose end is the loop's."""
        assert self._tasks is not None
        task = self._tasks.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def write_model(self) -> None:
        """Leave the trained model where the run's results are; JobError when it cannot be written."""
        directory = self._resolved.layout.model
        try:
            await self.compute(lambda: write_model(directory, self._engine.shape, self._engine.export()))
        except (OSError, SafetensorError) as error:
            raise JobError(
                Reason.CHECKPOINT_FAILED,
                f"{directory} cannot be written ({error}); free some space and use --resume",
            ) from error

    async def compute(self, work: Callable[[], T]) -> T:
        """Run something on the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._trainer, work)

    def _event(self, reason: str, message: str) -> None:
        record = EventRecord(
            run_id=self._run_id, time=time.time(), step=self._state.step, reason=reason, message=message
        )
        self._log.write(record.model_dump(mode="json"))

    # -- from start to end --------------------------------------------------------------------------------

    async def run(self, asked_to_stop: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """Run all steps that are left; StoppedError when that was cut short."""
        if self._tokenizer.vocab > self._engine.shape.vocab:
            raise InputError(
                f"the tokenizer has {self._tokenizer.vocab} token ids, but the model only "
                f"{self._engine.shape.vocab}; set spec.model.tokenizerUri to the model's own"
            )
        for item in self._task.known_items():
            encode_prompt(self._tokenizer, item, self._spec.algorithm)
        resumed = await self.compute(self._restore)
        warmup = WarmupResult(self._spec.warmup.steps, 0.0, cached=True)
        if not resumed:
            warmup = await self.compute(self._warm_up)
        self._state.run_ids.append(self._run_id)
        async with open_rollouts(
            self._resolved,
            run_id=self._run_id,
            site_table=self._table.digest,
            restarts=self._state.restarts,
            report=self._event,
            spawn=self._spawn,
        ) as rollouts:
            generator = Generator(
                self._spec,
                run_id=self._run_id,
                task=self._task,
                tokenizer=self._tokenizer,
                rollouts=rollouts,
                source=self._source,
                loader=self._loader,
                report=self._event,
            )
            try:
                # Inside the clients' lives: whatever uses them has ended when they close.
                async with asyncio.TaskGroup() as self._tasks:
                    if asked_to_stop is not None:
                        self._spawn(self._stop_after(asked_to_stop()))
                    await self._generate_and_train(rollouts, generator, warmup)
                    for task in list(self._beside):
                        task.cancel()
            except BaseExceptionGroup as errors:
                raise _cause(errors) from None

    async def _stop_after(self, asked: Coroutine[Any, Any, None]) -> None:
        await asked
        self._asked.set()
        async with self._stepping:
            if self._state.step > self._saved:
                await self._checkpoint()
        step = self._state.step
        raise StoppedError(
            f"stopped after step {step}, which is in a checkpoint"
            if step
            else "stopped before the first step"
        )

    async def _generate_and_train(
        self, rollouts: Rollouts, generator: Generator, warmup: WarmupResult
    ) -> None:
        await rollouts.start()
        self._spawn(rollouts.watch())
        await rollouts.push(self._state.step, self._engine.export())
        totals = self._state.totals
        if self._state.step == 0 and self._evaluation_items:
            totals.held_out_first = await generator.evaluate(self._evaluation_items, 0)
            totals.held_out_last = totals.held_out_first
        self._write_start(warmup)
        batches = Batches(
            self._spec.algorithm,
            generator,
            spawn=self._spawn,
            replicas=len(rollouts),
            first=self._state.next_group,
            pending=self._state.pending_groups,
        )
        await self._steps(rollouts, generator, batches)

    def _restore(self) -> bool:
        found = self._checkpoints.load(
            lambda sentence: self._event(Reason.CHECKPOINT_DAMAGED, sentence),
            measuring=self._engine.measure if self._sharded else measure_all,
        )
        if found is None:
            return False
        try:
            state = LoopState.model_validate(found.loop)
        except ValidationError:
            raise self._foreign("is of another version of tracerl") from None
        if state.job_uid != self._resolved.job_uid:
            raise self._foreign(f"is of job {state.job_uid}, not of {self._resolved.job_uid}")
        if self._sharded:
            self._engine.load_shards(found.tensors)
        else:
            self._engine.load_state(found.tensors)
        self._state, self._saved = state, state.step
        return True

    def _foreign(self, what: str) -> JobError:
        return JobError(
            Reason.CHECKPOINT_FAILED,
            f"the checkpoint in {self._resolved.layout.checkpoints} {what}; give another run directory",
        )

    def _warm_up(self) -> WarmupResult:
        def progress(done: int, total: int, loss: float | None) -> None:
            self._log.progress("warming up", done, total, **({} if loss is None else {"loss": loss}))

        result = warm_up(
            self._engine,
            self._spec,
            self._task,
            self._tokenizer,
            cache=None if self._sharded else self._resolved.cache_dir,
            progress=progress,
            report=lambda sentence: self._event(Reason.WARMUP_CACHE, sentence),
        )
        if result.cached:
            self._log.progress("warm-up from the cache", result.steps, result.steps)
        return result

    @property
    def _evaluation_items(self) -> list[Any]:
        return self._task.held_out[: self._spec.algorithm.evaluation.prompts]

    # -- steps --------------------------------------------------------------------------------------------

    async def _steps(self, rollouts: Rollouts, generator: Generator, batches: Batches) -> None:
        algorithm, checkpoint = self._spec.algorithm, self._spec.trainer.checkpoint
        learner = Learner(self._engine, self._plan, self._spec)
        timer = Timer()
        ended = time.perf_counter()
        while self._state.step < algorithm.steps:
            version = self._state.step
            pair = self._pair(rollouts, generator, version)
            if pair is not None:
                async with self._stepping:
                    await pair.begin()
            await batches.submit(version)
            waiting = time.perf_counter()
            groups = await batches.take(version)
            _split_wait(timer, groups, waiting, time.perf_counter())
            async with self._stepping:
                outcome = await self.compute(partial(learner.step, groups, version, timer))
                await self._check_missing(outcome.engine.records, version + 1, groups, generator)
                if pair is not None:
                    await pair.trained()
                held_out = await self.unless_asked_to_stop(
                    self._publish(rollouts, generator, batches, groups, timer=timer, pair=pair)
                )
                now = time.perf_counter()
                timer.seconds["total"], ended = now - ended - (pair.aside if pair else 0.0), now
                context = StepContext(
                    run_id=self._run_id,
                    time=time.time(),
                    step=version + 1,
                    steps=algorithm.steps,
                    method=self._spec.method.name.value,
                    guided=self._plan.guided,
                    groups_dropped=batches.dropped,
                    restarts=rollouts.restarts,
                    held_out_reward=held_out,
                    # Processes that were started again in the middle did more than the step.
                    baseline=pair.result(self._state.totals.baseline_pairs)
                    if pair is not None and rollouts.restarts == self._state.restarts
                    else None,
                )
                usage = await asyncio.to_thread(self._source.usage)
                transport = transport_of(usage, outcome.engine.records.read, batches.waits)
                record = step_record(context, groups, outcome, transport, timer.seconds)
                self._log.write(record.model_dump(mode="json"))
                self._state.totals.add(record)
                self._state.step = version + 1
                self._state.next_group, self._state.pending_groups = batches.cursor
                self._state.restarts = rollouts.restarts
                batches.dropped, batches.waits, timer = 0, 0, Timer()
                if self._state.step % checkpoint.every == 0 or self._state.step == algorithm.steps:
                    with timer.part("checkpoint"):
                        await self._checkpoint()

    def _is_pair(self, version: int) -> bool:
        """Whether the step that trains `version` has a baseline; never the first, which is like no other."""
        every = self._spec.observe.baseline_every
        return every > 0 and version > 0 and (version + 1) % every == 0

    def _pair(self, rollouts: Rollouts, generator: Generator, version: int) -> Pair | None:
        if not self._is_pair(version):
            return None
        size = self._spec.algorithm.prompts_per_step
        return Pair(
            self,
            self._bare,
            Learner(self._bare, replace(self._plan, guided=False), self._spec),
            partial(generator.groups, record=False),
            partial(self._taken_seconds, rollouts),
            version=version,
            indices=range(version * size, (version + 1) * size),
            replicas=len(rollouts),
            bare_first=(version + 1) // self._spec.observe.baseline_every % 2 == 1,
        )

    async def _taken_seconds(self, rollouts: Rollouts) -> float | None:
        """CPU time of rollouts, record stores and this process so far; None when one does not answer.

        Where both roles have GPUs, what they took of those.
        """
        of_gpu = self._spec.rollout.gpus_per_node > 0
        try:
            rollout = await rollouts.seconds(of_gpu=of_gpu)
        except RolloutError:
            return None
        if of_gpu:
            return rollout + await self.compute(self._bare.gpu_seconds)
        store = (await asyncio.to_thread(self._source.usage)).cpu_seconds
        return rollout + store + time.process_time()

    async def _publish(
        self,
        rollouts: Rollouts,
        generator: Generator,
        batches: Batches,
        groups: Sequence[Group],
        *,
        timer: Timer,
        pair: Pair | None,
    ) -> float | None:
        """Give the rollouts the new weights and prompts; returns the held-out reward when it is due."""
        version = self._state.step + 1
        with timer.part("push_weights"):
            await rollouts.push(version, self._engine.export())
        if pair is not None:
            await pair.pushed()
        # Released first: prompts may have waited for the room.
        await generator.release(groups)
        if pair is not None:
            await pair.released()
        if not self._is_pair(version):
            await batches.submit(version)
        if not (self._evaluation_items and self._evaluation_due(version)):
            return None
        with timer.part("evaluate"):
            return await generator.evaluate(self._evaluation_items, version)

    async def unless_asked_to_stop(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Wait for what the rollouts do; not when the loop is to stop, for they may be going too."""
        running, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else None
        finally:
            for each in (running, asked):
                each.cancel()
            await asyncio.gather(running, asked, return_exceptions=True)

    def _evaluation_due(self, step: int) -> bool:
        every = self._spec.algorithm.evaluation.every
        return step == self._spec.algorithm.steps or (every > 0 and step % every == 0)

    async def _check_missing(
        self, records: RecordCounts, step: int, groups: Sequence[Group], generator: Generator
    ) -> None:
        limit, missing = self._spec.records.max_missing_ratio, records.missing.total()
        if missing and self._asked.is_set():
            # Their stores are going, too. No step that lacks them is to be in the checkpoint.
            raise StoppedError(
                f"stopped in step {step}, whose records are gone; the checkpoint is of step {self._saved}"
            )
        if not records.rows or missing / records.rows <= limit:
            return
        reasons = ", ".join(f"{count} {reason}" for reason, count in records.missing.items())
        lacks = f"step {step} lacks {missing} of {records.rows} record rows ({reasons})"
        if await generator.incomplete(groups):
            # All frames were there when the step began. That a process can be lost is not what the limit is
            # about: failurePolicy bounds it.
            self._event(
                Reason.RECORD_STORE_RESTARTED,
                f"{lacks}, since their store was lost while it ran; they were rounded to nearest",
            )
            return
        raise JobError(
            Reason.RECORDS_MISSING,
            f"{lacks}, more than records.maxMissingRatio {limit}; see the logs of rollouts and record stores",
        )

    async def _checkpoint(self) -> None:
        # Before the checkpoint, so that a resumed run finds every step up to it in the log.
        self._log.sync()
        await self.compute(self._save)
        self._saved = self._state.step
        self._log.saved(self._saved)

    def _save(self) -> None:
        step, loop = self._state.step, self._state.model_dump(mode="json")
        if self._sharded:
            self._checkpoints.write(step, loop, self._engine.save_shards)
        else:
            self._checkpoints.save(step, self._engine.state(), loop)

    # -- reports ------------------------------------------------------------------------------------------

    def _write_start(self, warmup: WarmupResult) -> None:
        record = StartRecord(
            run_id=self._run_id,
            time=time.time(),
            resumed_from=self._state.step,
            steps=self._spec.algorithm.steps,
            method=self._spec.method.name.value,
            parameters=sum(tensor.numel() for _, tensor in self._engine.export()),
            row_bytes=self._table.row_bytes,
            whole_row_bytes=audit_table(self._engine.shape, self._spec).row_bytes,
            warmup_steps=warmup.steps,
            warmup_seconds=warmup.seconds,
            held_out_reward=self._state.totals.held_out_first,
            restarts=self._state.restarts,
        )
        self._log.write(record.model_dump(mode="json"))

    def finish(self, error: JobError | None) -> None:
        """Write the last line; JobError when the job was done but missed what it was expected to reach."""
        totals = self._state.totals
        found = expectations(self._spec.expect, totals) if error is None else ()
        error = error or broken(found)
        record = FinishRecord(
            run_id=self._run_id,
            time=time.time(),
            step=self._state.step,
            outcome="Failed" if error else "Complete",
            reason=error.reason if error else Reason.COMPLETED,
            message=str(error) if error else f"all {self._state.step} steps are done",
            reward_first=totals.reward_first,
            reward_last=totals.reward_last,
            held_out_first=totals.held_out_first,
            held_out_last=totals.held_out_last,
            gap_guided_mean=totals.gap_guided,
            gap_unguided_mean=totals.gap_unguided,
            gap_ratio=totals.gap_ratio,
            overhead_ratio=totals.overhead_ratio,
            baseline_overhead=totals.baseline_overhead,
            rows_missing=totals.rows_missing,
            record_bytes_per_token=totals.bytes_per_token,
            tokens_per_second=totals.tokens_per_second,
            expectations=found,
        )
        self._log.write(record.model_dump(mode="json"))
        if error is not None and found:
            raise error


def _split_wait(timer: Timer, groups: list[Group], start: float, end: float) -> None:
    """Divide the wait for a batch: until the last group was generated, then for rewards and records."""
    last = max(group.generated_at for group in groups)
    generated = min(max(last, start), end)
    timer.seconds["generate_wait"] += generated - start
    timer.seconds["fetch"] += end - generated
