"""One function from what is wanted and what is there to what to do: `reconcile`.

Level-triggered: the answer depends on the state alone, never on which change brought the call, so calling it
too often, too late, or again after half of an answer was carried out is right. There is no phase: the status
is what is true now, except that a job which ended stays ended, and that restarts are counted up.

Suspended means without a JobSet: machines, quota and pods are given back, and what may change while a job is
suspended is in the next one. A JobSet is never changed after it was made, so that a new version of the
operator starts nothing again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from tracerl.api.constants import ConditionType, Reason
from tracerl.api.errors import Fault
from tracerl.api.job import API_VERSION, KIND, Colocation, Progress, Status, TraceRLJob
from tracerl_operator import names
from tracerl_operator.check import blockers, earlier_job, is_foreign, lost_object, parse
from tracerl_operator.cluster import (
    Exit,
    at,
    clean_text,
    containers,
    exits,
    find_jobset,
    has_ended,
    index_of,
    is_leaving,
    is_true,
    name_of,
    number,
    owned_by,
    restarts_of,
)
from tracerl_operator.merge import PatchError
from tracerl_operator.objects import (
    CLEANING_SECONDS,
    DISRUPTED,
    JOBSET,
    cleaning_pod,
    job_marks,
    kept_right,
    node_rings,
    progress_ref,
    wanted,
)
from tracerl_operator.progress import claimed, mirrored
from tracerl_operator.resolve import output_place
from tracerl_operator.status import Finding, new_status, read_status, show, transitions
from tracerl_operator.stuck import (
    PATIENCE,
    ask_again,
    due_to_leave,
    explained,
    leaving,
    obstacle,
    queued,
)
from tracerl_operator.stuck import inquiries as inquiries_about
from tracerl_operator.times import later, parse_time, show_time
from tracerl_operator.types import Apply, Decision, Delete, Document, Event, Inquiry, Observed, Ref

_SERVERS = (names.ROLLOUT, names.STORE)
# What these hold cannot change, or is random.
_MADE_ONCE = frozenset({JOBSET[1], "Secret", "ComputeDomain"})
_RETRY = timedelta(minutes=1)
"""After this, what kept a job from starting is looked at again: not all of it is watched."""
_CLEANERS, _CLEANING_ATTEMPTS = 16, 3
"""Cleaning pods of a job that work at once, and those that are made for a node one after the other."""
_TERMINATED = "because it is being terminated"
"""What the API server answers to whatever is made in a namespace that is being deleted."""
_LABEL = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NO_OUTPUT = "spec.output.uri is not set, so a job that is suspended or restarted starts over"


def reconcile(job: Document, observed: Observed, now: datetime) -> Decision:
    """Decide what to do about a job, given as the API server has it. Never raises for what users wrote.

    `now` has a time zone. Nothing is decided about a job of another controller, nor about a document that no
    API server stored (without name, namespace or UID).
    """
    if not all(isinstance(at(job, "metadata", key), str) for key in ("name", "namespace", "uid")):
        return Decision()
    if is_foreign(job):
        return Decision()
    return _Reconciliation(job, observed, now).decide()


def inquiries(job: Document, observed: Observed, now: datetime) -> tuple[Inquiry, ...]:
    """Say what else to list before `reconcile` is asked, into `Observed.answers`: a few lists, seldom any."""
    if not all(isinstance(at(job, "metadata", key), str) for key in ("name", "namespace", "uid")):
        return ()
    if is_foreign(job) or at(job, "metadata", "deletionTimestamp") is not None:
        return ()
    return _Reconciliation(job, observed, now).inquiries()


@dataclass
class _Reconciliation:
    """What one call has found out and decided so far."""

    job: Document
    observed: Observed
    now: datetime
    apply: list[Document] = field(default_factory=list)
    delete: list[Delete] = field(default_factory=list)
    again: list[datetime] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        metadata = self.job["metadata"]
        self.name, self.namespace, self.uid = metadata["name"], metadata["namespace"], metadata["uid"]
        generation = at(metadata, "generation")
        self.generation = generation if isinstance(generation, int) else None
        self.before = read_status(self.job)
        self.found = find_jobset(self.observed, self.uid)
        self.jobset: Document = self.found[1] if self.found else {}
        # Anybody may put a label on a pod; only what this job made cleans for it, or says how it does.
        self.cleaners: list[Document] = []
        self.pods: list[Document] = []
        for pod in self.observed.pods:
            cleans = at(pod, "metadata", "labels", names.LABEL_CLEANS) and owned_by(pod, self.uid)
            (self.cleaners if cleans else self.pods).append(pod)
        uid = at(self.jobset, "metadata", "uid")
        self.current = [
            p
            for p in self.pods
            if uid is not None and at(p, "metadata", "labels", names.LABEL_JOBSET_UID) == uid
        ]

    @cached_property
    def _read(self) -> tuple[TraceRLJob | None, list[Fault]]:
        # Not before it is asked for: inquiries go without, and are made before every decision.
        return parse(self.job)

    @property
    def parsed(self) -> TraceRLJob | None:
        """The job, where it is one."""
        return self._read[0]

    @property
    def faults(self) -> list[Fault]:
        """What is wrong with it."""
        return self._read[1]

    def inquiries(self) -> tuple[Inquiry, ...]:
        """What to list now."""
        return tuple(inquiry for inquiry, waited in self._questions() if waited >= PATIENCE)

    def _questions(self) -> list[tuple[Inquiry, timedelta]]:
        ended = self.before.terminal is not None or is_true(self.jobset, "Completed")
        removed = at(self.jobset, "metadata", "deletionTimestamp") is not None
        if not self.found or ended or removed or is_true(self.jobset, "Failed"):
            return []
        queue = "Workload" in self.observed.served and bool(at(self.job, "spec", "placement", "queue"))
        return list(inquiries_about(self.jobset, self.current, self.now, queue=queue))

    # -- what is true -------------------------------------------------------------------------------------

    def decide(self) -> Decision:
        """Go through what can be true of the job, from the end of its life to its beginning."""
        if at(self.job, "metadata", "deletionTimestamp") is not None:
            self._remove_jobset()
            waits = self._clean_rings()
            if self.before.terminal is not None or not waits:
                return self._decision(None)
            return self._show(Finding(Reason.INTERRUPTED, clean_text(f"the job is being deleted; {waits}")))
        if self.before.terminal is not None:
            return self._ended(self.before)
        if at(self.job, "spec", "suspend") is True:
            return self._suspended()
        job = self.parsed
        if job is None and self.found is not None:
            # It ran under another version of the operator, whose definition of a job was another one.
            return self._show(Finding(Reason.CONFIGURATION, self._fault()), start=self.before.start_time)
        if job is None or (self.faults and self.found is None):
            return self._fail(Reason.INVALID_SPEC, self._fault())
        if self.found is None:
            return self._start(job)
        if at(self.jobset, "metadata", "deletionTimestamp") is not None:
            return self._removing()
        return self._running(job)

    def _fault(self) -> str:
        more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
        return clean_text(f"{self.faults[0]}{more}")

    def _wanted(self, job: TraceRLJob) -> list[Document]:
        observed = self.observed
        return wanted(
            job,
            self.uid,
            observed.installation,
            served=observed.served,
            token=observed.new_token,
            restarts=self.before.restarts,
        )

    def _start(self, job: TraceRLJob) -> Decision:
        try:
            documents = self._wanted(job)
        except PatchError as error:
            return self._fail(Reason.INVALID_SPEC, clean_text(str(error)))
        refs = [Apply(document).ref for document in documents]
        blocked = list(blockers(job, self.uid, self.observed, refs))
        if blocked:
            self.again.append(self.now + _RETRY)
            return self._show(Finding(Reason.CONFIGURATION, clean_text("; ".join(blocked))))
        left = earlier_job(self.uid, self.observed, refs)
        if left is not None:
            self.again.append(self.now + PATIENCE)
            return self._waiting(left)
        if any(not has_ended(pod) for pod in self.pods):
            return self._removing()
        if self.cleaners:
            self._drop_cleaners()
            return self._waiting("rings of the last attempt are being removed from the nodes")
        self._mark_nodes(job)
        self.apply += [document for document in documents if self._differs(document)]
        lacking = tuple(f"{Apply(document).ref}:" for document in self.apply)
        refusals = [refusal for refusal in self.observed.refusals if refusal.startswith(lacking)]
        if refusals:
            self.again.append(self.now + _RETRY)
            refused = "; ".join(clean_text(refusal) for refusal in refusals)
            message = f"the API server refused {refused}; it is asked again every minute"
            return self._show(Finding(Reason.CONFIGURATION, clean_text(message)))
        return self._waiting("the pods are being made")

    def _running(self, job: TraceRLJob) -> Decision:
        if is_true(self.jobset, "Completed"):
            steps = job.spec.algorithm.steps
            return self._end(Finding(Reason.COMPLETED, f"all {steps} steps are done", terminal="Complete"))
        if is_true(self.jobset, "Failed"):
            return self._after_failure(job)
        servers = [one for one in exits(filter(_works, self.current), _SERVERS) if one.final]
        if servers:
            return self._fail(servers[0].reason, _sentence(servers[0]))
        budget = job.spec.failure_policy.max_restarts
        counted = self._restarts_by_role()
        worst = max(counted, key=lambda role: counted[role])
        if counted[worst] > budget:
            message = (
                f"the {worst} was restarted {counted[worst]} times, and failurePolicy.maxRestarts is {budget}"
            )
            last = self._last_end(worst)
            why = f" (last: {last})" if last else ""
            return self._fail(Reason.RESTARTS_EXHAUSTED, clean_text(message + why))
        held = at(self.jobset, "spec", "suspend") is True
        start = None if held else self.before.start_time or show_time(self.now)
        began, limit = parse_time(start), job.spec.active_deadline_seconds
        if began is not None and limit is not None:
            deadline = _after_seconds(began, limit)
            if deadline is not None and deadline <= self.now:
                message = f"the job ran longer than spec.activeDeadlineSeconds ({limit} s)"
                return self._fail(Reason.DEADLINE_EXCEEDED, message)
            if deadline is not None:
                self.again.append(deadline)
        self._mark_nodes(job)
        lasting = kept_right(job, self.uid, self.observed.installation, served=self.observed.served)
        self.apply += [document for document in lasting if self._differs(document)]
        if held:
            return self._show(Finding(Reason.QUEUED, self._queue_says(job), suspended=True))
        return self._show(self._readiness(job), start=start)

    def _queue_says(self, job: TraceRLJob) -> str:
        self._ask_again()
        queue = job.spec.placement.queue
        if queue is None:
            return "its JobSet is suspended; whoever did that resumes it"
        said = queued(self.observed.answers, str(at(self.jobset, "metadata", "uid")))
        return clean_text(f"waits for the queue {queue}" + (f": {said}" if said else ""))

    def _ask_again(self) -> None:
        """See to it that what is not watched is asked for in time."""
        for _, waited in self._questions():
            first = self.now + PATIENCE - waited
            self.again.append(first if first > self.now else ask_again(self.now, waited))

    def _readiness(self, job: TraceRLJob) -> Finding:
        done, total = self._ready_nodes()
        if done != total and self._trainer_is_done():
            message = "the trainer has ended; its JobSet is being completed"
            return Finding(Reason.RUNNING, message, ready=True)
        lost = lost_object(job, self.observed)
        if lost is not None:
            return Finding(Reason.CONFIGURATION, lost)
        message = f"{done} of {total} nodes are ready"
        suffix = "" if job.spec.output.uri else f"; {_NO_OUTPUT}"
        if done == total:
            return Finding(Reason.RUNNING, message + suffix, ready=True)
        self._ask_again()
        found = obstacle(self.jobset, self.current, self.observed.answers, self.now)
        if found is not None:
            return found
        cause = self._what_happened()
        return Finding(Reason.STARTING, clean_text(message + (f"; {cause}" if cause else suffix)))

    def _what_happened(self) -> str:
        """Say why pods that ran do not run; empty where nothing is known."""
        due = due_to_leave(self.current, self.now)
        if due is not None:
            self.again.append(due)
        return explained(self.current, self.now) or "".join(_sentence(one) for one in self._ends()[:1])

    def _ends(self) -> list[Exit]:
        """Containers that ended, those first that others ended with: a pod's servers go with its trainer."""
        servers = exits(filter(_works, self.current), _SERVERS)
        return [*exits(self.current, (names.TRAINER,)), *servers]

    def _last_end(self, role: str) -> str:
        """Say how a container of a role ended last, which is more than once; empty where nobody knows."""
        found = exits(filter(_works, self.current), (role,)) or exits(self.current, (role,))
        if found:
            return _sentence(found[0])
        for pod in self.current:
            for status in containers(pod):
                if at(status, "name") == role and at(status, "lastState", "terminated", "exitCode") == 0:
                    return clean_text(f"{role} of {name_of(pod)}: ended with exit code 0")
        return ""

    def _trainer_is_done(self) -> bool:
        """Whether trainer 0 ended well, and no other trainer badly."""
        done = any(
            at(status, "name") == names.TRAINER and at(status, "state", "terminated", "exitCode") == 0
            for pod in self.current
            if index_of(pod) == "0" and not is_leaving(pod)
            for status in containers(pod)
        )
        return done and not exits(self.current, (names.TRAINER,))

    def _after_failure(self, job: TraceRLJob) -> Decision:
        """End the job, or make its JobSet again: its budget was that of when it was made."""
        ended = exits(self.current, (names.TRAINER,))
        final = next((one for one in ended if one.final), None)
        if final is not None:
            return self._fail(final.reason, _sentence(final))
        # Who lost a peer that was taken from its node is not to blame either.
        disrupted = any(one.reason is Reason.TRAINER_LOST for one in ended) and any(
            is_true(pod, DISRUPTED) for pod in self.current
        )
        needed, budget = self._jobset_restarts() + (not disrupted), job.spec.failure_policy.max_restarts
        if needed > budget:
            why = f" (last: {_sentence(ended[0])})" if ended else ""
            message = f"{needed} restarts were needed, and failurePolicy.maxRestarts is {budget}{why}"
            return self._fail(Reason.RESTARTS_EXHAUSTED, clean_text(message))
        self._remove_jobset()
        return self._waiting("all pods are started again", restarts=needed)

    def _suspended(self) -> Decision:
        self._remove_jobset()
        released = self.found is None and all(has_ended(pod) for pod in self.pods)
        waits = self._clean_rings()
        message = "spec.suspend is true"
        if not released:
            message += "; pods are being removed"
        elif waits:
            message += f"; {waits}"
        return self._show(Finding(Reason.SUSPENDED_BY_SPEC, clean_text(message), suspended=released))

    def _removing(self) -> Decision:
        due = due_to_leave(self.pods, self.now)
        if due is not None:
            self.again.append(due)
        late = leaving(self.pods, self.now)
        message = "the pods of the last attempt are being removed" + (f"; {late}" if late else "")
        return self._waiting(clean_text(message))

    def _waiting(self, message: str, *, restarts: int = 0) -> Decision:
        start = self.before.start_time
        return self._show(Finding(Reason.STARTING, message), start=start, restarts=restarts)

    # -- the end ------------------------------------------------------------------------------------------

    def _fail(self, reason: Reason, message: str) -> Decision:
        return self._end(Finding(reason, message, terminal="Failed"))

    def _end(self, finding: Finding) -> Decision:
        return self._ended(self._status(finding, start=self.before.start_time))

    def _ended(self, status: Status) -> Decision:
        """Give back what an ended job holds; its JobSet stays with its logs when it ended by itself."""
        if not (is_true(self.jobset, "Completed") or is_true(self.jobset, "Failed")):
            self._remove_jobset()
        self._clean_rings()
        seconds = at(self.job, "spec", "ttlSecondsAfterFinished")
        completed = parse_time(status.completion_time)
        if isinstance(seconds, int) and completed is not None:
            due = _after_seconds(completed, seconds)
            if due is None:
                return self._decision(status)
            if due <= self.now:
                self.delete.append(Delete(Ref(API_VERSION, KIND, self.name), self.uid))
            else:
                self.again.append(due)
        return self._decision(status)

    # -- the answer ---------------------------------------------------------------------------------------

    def _show(self, finding: Finding, *, start: str | None = None, restarts: int = 0) -> Decision:
        return self._decision(self._status(finding, start=start, restarts=restarts))

    def _status(self, finding: Finding, *, start: str | None, restarts: int = 0) -> Status:
        done, total = self._ready_nodes()
        total_restarts = max(self.before.restarts, restarts, self._all_restarts())
        return new_status(
            self.before,
            finding,
            self.now,
            generation=self.generation,
            ready=f"{0 if finding.terminal or finding.suspended else done}/{total}",
            restarts=total_restarts,
            progress=self._progress(final=finding.terminal is not None),
            start_time=start,
            output=output_place(self.parsed.spec, self.name, self.uid)
            if self.parsed is not None
            else self.before.output,
        )

    def _progress(self, *, final: bool) -> Progress:
        if self.parsed is None:
            return self.before.progress
        steps = self.parsed.spec.algorithm.steps
        claim = claimed(self.observed.objects.get(progress_ref(self.name)), steps)
        progress, again = mirrored(self.before.progress, claim, self.now, final=final)
        if again is not None:
            self.again.append(again)
        return progress

    def _decision(self, status: Status | None) -> Decision:
        changed = status is not None and show(status) != show(self.before)
        return Decision(
            apply=tuple(Apply(document) for document in self.apply),
            delete=tuple(self.delete),
            status=show(status) if status is not None and changed else None,
            events=(
                *(transitions(self.before, status, self._cause()) if status is not None and changed else ()),
                *self.events,
            ),
            look_again_at=min(self.again, default=None),
        )

    def _cause(self) -> str:
        """Say why pods were restarted: by how they ended or, where others are by now, as was said then."""
        found = self._ends()
        if found:
            return _sentence(found[0])
        ready = [one for one in self.before.conditions if one.type == ConditionType.READY]
        seen = [f"; seen last: {one.message}" for one in ready if one.status == "False"]
        return clean_text(f"its pods ended{''.join(seen)}")

    # -- restarts and readiness ---------------------------------------------------------------------------

    def _jobset_restarts(self) -> int:
        before = at(self.jobset, "metadata", "annotations", names.ANNOTATION_RESTARTS_BEFORE)
        counted = int(before) if isinstance(before, str) and before.isdecimal() and len(before) < 10 else 0
        return counted + number(at(self.jobset, "status", "restartsCountTowardsMax"))

    def _restarts_by_role(self) -> dict[str, int]:
        """Restarts of all pods count as the trainer's: it is what the JobSet restarts for."""
        servers = {role: restarts_of(self.current, role) for role in _SERVERS}
        return {names.TRAINER: self._jobset_restarts(), **servers}

    def _all_restarts(self) -> int:
        return sum(self._restarts_by_role().values())

    def _ready_nodes(self) -> tuple[int, int]:
        if self.parsed is None:
            return 0, 0
        spec = self.parsed.spec
        total = sum(names.replicated_jobs(spec).values())
        ready = [pod for pod in self.current if is_true(pod, "Ready") and not is_leaving(pod)]
        if spec.placement.colocation is not Colocation.NODE:
            return min(len(ready), total), total
        roles = {
            role: {
                index_of(p) for p in ready if at(p, "metadata", "labels", names.LABEL_REPLICATED_JOB) == role
            }
            for role in (names.ROLLOUT, names.TRAINER)
        }
        pairs = roles[names.ROLLOUT] & roles[names.TRAINER]
        return min(len(pairs), spec.trainer.nodes), spec.trainer.nodes

    # -- objects ------------------------------------------------------------------------------------------

    def _differs(self, document: Document) -> bool:
        """Whether an object has to be applied: what is there says less, or something else."""
        ref = Apply(document).ref
        found = self.observed.objects.get(ref)
        return found is None or (ref.kind not in _MADE_ONCE and not _contains(found, document))

    def _remove_jobset(self) -> None:
        if self.found is None or at(self.jobset, "metadata", "deletionTimestamp") is not None:
            return
        uid = at(self.jobset, "metadata", "uid")
        self.delete.append(Delete(self.found[0], str(uid), "Foreground"))

    # -- rings on nodes -----------------------------------------------------------------------------------

    def _nodes(self, job: TraceRLJob) -> list[str]:
        """Nodes that may hold a ring: those of pods that are there, and those that were written down.

        What is written down anybody may change who may change the job: it costs no more pods than a job of
        this size could have needed.
        """
        noted = at(self.job, "metadata", "annotations", names.ANNOTATION_RING_NODES)
        known = set(noted.split(",")) if isinstance(noted, str) else set()
        seen = {node for pod in self.pods if isinstance(node := at(pod, "spec", "nodeName"), str)}
        most = job.spec.trainer.nodes + job.spec.rollout.nodes + 16 * self.before.restarts
        return sorted([node for node in (*sorted(seen), *sorted(known - seen)) if _names_node(node)][:most])

    def _marked(self) -> bool:
        finalizers = at(self.job, "metadata", "finalizers")
        return isinstance(finalizers, list) and names.FINALIZER in finalizers

    def _mark_nodes(self, job: TraceRLJob) -> None:
        """Write down which nodes have to be cleaned, before or while there is something to clean."""
        if not node_rings(job):
            return
        nodes = self._nodes(job)
        noted = at(self.job, "metadata", "annotations", names.ANNOTATION_RING_NODES)
        if not self._marked() or noted != ",".join(nodes):
            self.apply.append(job_marks(self.name, self.namespace, self.uid, nodes))

    def _clean_rings(self) -> str:
        """Remove the rings of a job that has stopped, and then the finalizer that waits for this.

        Says what the finalizer waits for; empty where it waits for nothing.
        """
        if not self._marked():
            self._drop_cleaners()
            return ""
        job = self.parsed
        # Anybody may write the finalizer and nodes into a job that never had a ring there.
        if job is None or not node_rings(job):
            return self._unmark([])
        waits = "its rings are removed from the nodes first"
        if (self.found is not None and self.delete) or any(not has_ended(pod) for pod in self.pods):
            return waits
        nodes = self._nodes(job)
        if nodes and not self.observed.installation.node_ring:
            return (
                f"the finalizer {names.FINALIZER} waits until the chart is installed with "
                "nodeRing.enabled=true, so that its rings can be removed from the nodes"
            )
        lacking: list[Document] = []
        working, left, unclean = [], [], []
        for node in nodes:
            more, works, gone = self._cleaning(node)
            lacking += more
            working += [node] * works
            left += [node] * gone
            unclean += [node] * (bool(more) or works or gone)
        refused = [clean_text(one) for one in self.observed.refusals if one.startswith("Pod/")]
        if any(_TERMINATED in one for one in refused):
            return self._unmark(unclean)
        if not lacking and not working:
            return self._unmark(left)
        self.apply += lacking[: max(0, _CLEANERS - len(working))]
        if refused:
            self.again.append(self.now + _RETRY)
            waits += f"; the API server refused {refused[0]}; it is asked again every minute"
        return waits

    def _cleaning(self, node: str) -> tuple[list[Document], bool, bool]:
        """Give the next cleaning pod of a node, if it is due, whether one is at work, and whether all failed.

        Nobody waits for a node that does not answer.
        """
        image = self.observed.installation.rollout_image
        there = {name_of(pod): pod for pod in self.cleaners}
        made = [
            cleaning_pod(self.name, self.namespace, self.uid, node, image, attempt=attempt)
            for attempt in range(_CLEANING_ATTEMPTS)
        ]
        found = [there[name_of(pod)] for pod in made if name_of(pod) in there]
        lacking = [pod for pod in made if name_of(pod) not in there]
        if any(at(pod, "status", "phase") == "Succeeded" for pod in found):
            return [], False, False
        if not found:
            return lacking[:1], False, False
        ended = has_ended(found[-1])
        began = parse_time(at(found[-1], "metadata", "creationTimestamp"))
        pause = _RETRY if ended else timedelta(seconds=2 * CLEANING_SECONDS)
        until = None if began is None else later(began, pause)
        if ended and not lacking:
            return [], False, True
        if until is not None and until > self.now:
            self.again.append(until)
            return [], True, False
        if ended:
            return lacking[:1], False, False
        return [], until is None, until is not None

    def _unmark(self, left: list[str]) -> str:
        """Take the finalizer away, and say which nodes keep a directory of the job; waits for nothing."""
        self.apply.append(job_marks(self.name, self.namespace, self.uid, None))
        if left:
            which = ", ".join(left)
            message = f"/dev/shm/{self.uid} was not removed, remove it yourself: on the nodes {which}"  # noqa: S108
            self.events.append(Event("Warning", Reason.CONFIGURATION.value, clean_text(message)))
        return ""

    def _drop_cleaners(self) -> None:
        for pod in self.cleaners:
            if at(pod, "metadata", "deletionTimestamp") is None:
                ref = Ref("v1", "Pod", str(at(pod, "metadata", "name")))
                self.delete.append(Delete(ref, str(at(pod, "metadata", "uid"))))


def _names_node(text: str) -> bool:
    """Whether a text is an RFC 1123 subdomain, as names of nodes are."""
    return len(text) <= 253 and all(_LABEL.fullmatch(part) for part in text.split("."))


def _works(pod: Document) -> bool:
    """Whether a pod is at work: how servers end that are told to says nothing of the job."""
    told = at(pod, "metadata", "deletionTimestamp") is not None or has_ended(pod)
    done = any(
        at(status, "name") == names.TRAINER and at(status, "state", "terminated") is not None
        for status in containers(pod)
    )
    return not (told or done)


def _after_seconds(time: datetime, seconds: int) -> datetime | None:
    """Give a time that many seconds later; None where it is after the end of all calendars."""
    try:
        return later(time, timedelta(seconds=seconds))
    except OverflowError:
        return None


def _sentence(one: Exit) -> str:
    return clean_text(f"{one.container} of {one.pod}: {one.message}")


def _contains(found: object, wished: object) -> bool:
    """Whether a document has all that is wished; servers fill in more, and never more items of our lists."""
    if isinstance(wished, dict):
        return isinstance(found, dict) and all(_contains(found.get(k), v) for k, v in wished.items())
    if isinstance(wished, list):
        return (
            isinstance(found, list)
            and len(found) == len(wished)
            and all(_contains(one, other) for one, other in zip(found, wished, strict=True))
        )
    return found == wished
