"""The rules of level API once more in CEL, so that `kubectl apply` refuses what `tracerl validate` refuses.

Every rule of `tracerl.api.rules` that needs the manifest alone has its expressions here; a test on a real API
server compares both over a table of manifests. Defaults are filled in before an expression runs, so a field
with a default is always there; one without (null in the models) is tested with ``has``.
"""

from __future__ import annotations

from typing import NamedTuple

from tracerl.api.ring import SEGMENT_SIZES
from tracerl.api.rules import CREDENTIALS, GB200_NODE_GPUS, OWN_FIELDS, PLAIN_TEXTS, URLS


class Cel(NamedTuple):
    """One expression; true where the rule holds."""

    rule: str
    """Name of the rule in `tracerl.api.rules`."""
    at: str
    """Path of the field that `self` is."""
    expression: str
    message: str
    """One sentence: what is wrong, and what to write."""
    field: str = ""
    """Where the message points, below `at`."""


_TRACE = "self.method.name == 'TRACE'"
_TRAJECTORIES = "self.algorithm.promptsPerStep * self.algorithm.samplesPerPrompt"
_TOKENS = "self.algorithm.maxPromptTokens + self.algorithm.maxResponseTokens"
_ROLLOUT_GPUS = "(self.gpusPerNode * self.nodesPerReplica)"
_STAGE = "(self.parallelism.tensor * self.parallelism.context * self.parallelism.data)"
_TRAINER_GPUS = "(self.gpusPerNode * self.nodes)"
_GPUS_BY_FIELD = "asks for nvidia.com/gpu; remove it and write gpusPerNode"
TEMPLATE_FIELDS = {
    "activeDeadlineSeconds": "integer",
    "ttlSecondsAfterFinished": "integer",
    "restartPolicy": "string",
    "backoffLimit": "integer",
    "suspend": "boolean",
}
"""Fields of a pod template that a job refuses, by type: expressions see only what has one."""


def _quantity(path: str) -> str:
    return f"quantity(string({path}))"


def _less(path: str, other: str) -> str:
    return f"{_quantity(path)}.isLessThan({other})"


_SEGMENTS = list(SEGMENT_SIZES)
_ABSOLUTE_FILE = "!self.uri.startsWith('file://') || self.uri.startsWith('file:///')"
_NAMES_BUCKET = (
    "!self.uri.startsWith('s3://') || self.uri.matches('^s3://[A-Za-z0-9][A-Za-z0-9_.-]{1,254}(/|$)')"
)


def _s3_options(rule: str, at: str) -> tuple[Cel, ...]:
    """Expressions about the secret and the endpoint of a place in S3."""
    return (
        *(
            Cel(
                rule,
                at,
                f"!has(self.{name}) || (has(self.uri) && self.uri.startsWith('s3://'))",
                "is for S3, but uri is not an s3:// URL; remove it, or write uri: s3://BUCKET/PREFIX",
                f".{name}",
            )
            for name in ("secretName", "endpointUrl")
        ),
        Cel(
            rule,
            at,
            "!has(self.endpointUrl) || self.endpointUrl.matches('^https?://')",
            "is not an http or https URL; write for example http://minio:9000",
            ".endpointUrl",
        ),
        Cel(
            rule,
            at,
            "!has(self.endpointUrl) || !self.endpointUrl.matches('^[^/]*//[^/?#]*@')",
            "holds a user name or a password, which everybody could read with the job; write the URL "
            "without, and give credentials by secretName",
            ".endpointUrl",
        ),
    )


CEL: tuple[Cel, ...] = (
    *(
        Cel(
            "urls-without-credentials",
            path,
            f"!self.matches('{CREDENTIALS}')",
            "holds credentials, which everybody could read with the job; write the URL without, and give "
            "credentials by secretName",
        )
        for path in URLS
    ),
    *(
        Cel(
            "no-control-characters",
            path,
            "!self.matches('[[:cntrl:]]')",
            "holds a control character; remove it",
        )
        for path in PLAIN_TEXTS
    ),
    Cel(
        "model-scheme",
        "spec.model.uri",
        "self.matches('^(builtin|hf|s3|file|pvc)://')",
        "is not a model URL; write builtin://NAME, hf://ORG/NAME, s3://…, file:///PATH or pvc://CLAIM/PATH",
    ),
    Cel("one-task", "spec.task", "has(self.name) != has(self.uri)", "write either name or uri"),
    Cel(
        "task-name",
        "spec.task",
        "!has(self.name) || self.name == 'builtin/chain_sum' || "
        "self.name.matches('^reasoning_gym/[a-z0-9_]+$')",
        "is not a known task; write builtin/chain_sum or reasoning_gym/DATASET",
        ".name",
    ),
    Cel(
        "task-parts",
        "spec.task",
        "has(self.name) || !has(self.uri) || has(self.reward)",
        "reward is missing with uri; write reward: module:function",
    ),
    Cel(
        "task-parts",
        "spec.task",
        "!has(self.name) || has(self.uri) || !has(self.reward)",
        "is for tasks from a uri, a named task scores itself; remove it, or write uri instead of name",
        ".reward",
    ),
    Cel(
        "task-parts",
        "spec.task",
        "!has(self.source) || has(self.reward) || has(self.uri)",
        "holds a reward module, but no reward is named; remove it",
        ".source",
    ),
    Cel(
        "one-reward-source",
        "spec.task.source",
        "!(has(self.configMap) && has(self.uri))",
        "has both configMap and uri; remove one of them",
    ),
    Cel(
        "group-size",
        "spec.algorithm.samplesPerPrompt",
        "self >= 2",
        "is 1, and GRPO compares the trajectories of a group; write 2 or more, for example 8",
    ),
    Cel(
        "mini-batches-divide",
        "spec.algorithm",
        "(self.promptsPerStep * self.samplesPerPrompt) % self.miniBatches == 0",
        "does not divide the trajectories of a step, promptsPerStep x samplesPerPrompt; write a divisor",
        ".miniBatches",
    ),
    Cel(
        "evaluation-prompts",
        "spec",
        "self.algorithm.evaluation.prompts <= self.task.heldOutPrompts",
        "is more than spec.task.heldOutPrompts; write at most that, or raise it",
        ".algorithm.evaluation.prompts",
    ),
    Cel(
        "expected-reward-is-measured",
        "spec",
        "self.algorithm.evaluation.prompts > 0 || "
        "!(has(self.expect.minReward) || has(self.expect.minRewardGain))",
        "asks for a reward of a job without evaluation prompts; write algorithm.evaluation.prompts: 256",
        ".expect",
    ),
    Cel(
        "gap-ratio-needs-trace",
        "spec",
        f"!has(self.expect.maxGapRatio) || {_TRACE}",
        "needs guidance, which only TRACE has; remove it, or use maxGap",
        ".expect.maxGapRatio",
    ),
    Cel(
        "one-trajectory-fits",
        "spec",
        f"self.rollout.kvCacheTokens >= {_TOKENS}",
        "is less than one trajectory; write at least maxPromptTokens + maxResponseTokens",
        ".rollout.kvCacheTokens",
    ),
    Cel(
        "one-trajectory-fits",
        "spec",
        f"self.trainer.microBatchTokens >= {_TOKENS}",
        "is less than one trajectory; write at least maxPromptTokens + maxResponseTokens",
        ".trainer.microBatchTokens",
    ),
    Cel(
        "targets-once",
        "spec.quantization.targets",
        "self.all(x, self.exists_one(y, y == x))",
        "names a target twice; remove one",
    ),
    Cel(
        "recorded-second-input",
        "spec",
        f"self.quantization.secondInput != 'Recorded' || {_TRACE}",
        "is Recorded, but only TRACE records; write RTN, or method.name: TRACE",
        ".quantization.secondInput",
    ),
    Cel(
        "recorded-second-input",
        "spec.quantization",
        "self.secondInput != 'Recorded' || 'RoutedExperts' in self.targets",
        "is Recorded, but the experts are not quantised; write RTN, or add RoutedExperts to targets",
        ".secondInput",
    ),
    Cel(
        "mxfp4-has-no-tensor-scale",
        "spec.quantization",
        "self.format != 'MXFP4' || self.tensorScale == 'Fixed'",
        "has no meaning, since MXFP4 has no tensor scale; write Fixed",
        ".tensorScale",
    ),
    Cel(
        "trace-block",
        "spec.method",
        "self.name == 'TRACE' || !has(self.trace)",
        "is set, but the method is another; remove it, or write method.name: TRACE",
        ".trace",
    ),
    Cel(
        "trace-records-something",
        "spec.method.trace",
        "self.codeBits > 0 || self.scaleBits > 0",
        "records nothing with codeBits 0 and scaleBits 0; write codeBits: 1 and scaleBits: 3",
    ),
    Cel(
        "layer-policy",
        "spec.method.trace.layers",
        "(self.policy == 'Last') == has(self.last)",
        "write last, the number of last layers, with policy Last and with no other",
    ),
    Cel(
        "layer-policy",
        "spec.method.trace.layers",
        "self.policy == 'List' ? has(self.indices) && size(self.indices) > 0 : !has(self.indices)",
        "write indices, counted from 0, with policy List and with no other",
    ),
    Cel(
        "layer-policy",
        "spec.method.trace.layers",
        "!has(self.indices) || self.indices.all(x, self.indices.exists_one(y, y == x))",
        "names a layer twice; write each index once",
        ".indices",
    ),
    Cel(
        "records-need-method",
        "spec",
        "self.records.auditEvery == 0 || self.method.name != 'BF16'",
        "has no codes to audit under method BF16; write 0",
        ".records.auditEvery",
    ),
    Cel(
        "records-need-method",
        "spec",
        f"self.observe.baselineEvery == 0 || {_TRACE}",
        "compares with and without records, which only TRACE has; write 0, or method.name: TRACE",
        ".observe.baselineEvery",
    ),
    Cel(
        "native-numerics",
        "spec.rollout",
        "self.numerics != 'Native' || self.engine != 'Reference'",
        "is Native, but the Reference engine has no FP4 kernels; write Emulated, or engine: SGLang",
        ".numerics",
    ),
    Cel(
        "native-numerics",
        "spec.rollout",
        "self.numerics != 'Native' || self.gpusPerNode > 0",
        "is Native, but the rollout has no GPU; write Emulated, or gpusPerNode: 4",
        ".numerics",
    ),
    Cel(
        "replicas-divide",
        "spec.rollout",
        "self.nodes % self.nodesPerReplica == 0",
        "is no multiple of nodesPerReplica; write a multiple, or another nodesPerReplica",
        ".nodes",
    ),
    Cel(
        "rollout-parallelism",
        "spec.rollout",
        f"{_ROLLOUT_GPUS} == 0 || self.parallelism.tensor * self.parallelism.data == {_ROLLOUT_GPUS}",
        "tensor x data is not the number of a replica's GPUs, gpusPerNode x nodesPerReplica",
        ".parallelism",
    ),
    Cel(
        "rollout-parallelism",
        "spec.rollout",
        f"{_ROLLOUT_GPUS} == 0 || {_ROLLOUT_GPUS} % self.parallelism.expert == 0",
        "expert does not divide a replica's GPUs; write a divisor",
        ".parallelism.expert",
    ),
    Cel(
        "trainer-parallelism",
        "spec.trainer",
        f"{_TRAINER_GPUS} == 0 || {_STAGE} * self.parallelism.pipeline == {_TRAINER_GPUS}",
        "tensor x pipeline x context x data is not the number of the trainer's GPUs, gpusPerNode x nodes",
        ".parallelism",
    ),
    Cel(
        "trainer-parallelism",
        "spec.trainer",
        f"{_TRAINER_GPUS} == 0 || {_STAGE} % self.parallelism.expert == 0",
        "expert does not divide the GPUs of a pipeline stage; write a divisor",
        ".parallelism.expert",
    ),
    Cel(
        "ranks-on-every-node",
        "spec.trainer",
        f"self.gpusPerNode > 0 || ({_STAGE} * self.parallelism.pipeline) % self.nodes == 0",
        "does not divide the ranks of parallelism; write for example as many as parallelism.data",
        ".nodes",
    ),
    Cel(
        "trainers-have-work",
        "spec",
        f"self.trainer.parallelism.data <= {_TRAJECTORIES}",
        "is more than the trajectories of a step, promptsPerStep x samplesPerPrompt; write at most that",
        ".trainer.parallelism.data",
    ),
    Cel(
        "colocated-nodes",
        "spec",
        "self.placement.colocation == 'None' || self.rollout.nodes == self.trainer.nodes",
        "is not rollout.nodes, but colocation Pod or Node pairs them; write as many, and as many ranks in "
        "trainer.parallelism.data, or placement.colocation: None",
        ".trainer.nodes",
    ),
    *(
        Cel(
            "gpu-split",
            "spec",
            f"self.placement.fabric != 'ComputeDomain' || self.{role}.gpusPerNode <= {GB200_NODE_GPUS}",
            "is more than the 4 GPUs of a ComputeDomain's node; write at most 4",
            f".{role}.gpusPerNode",
        )
        for role in ("rollout", "trainer")
    ),
    Cel(
        "gpu-split",
        "spec",
        "self.placement.fabric != 'ComputeDomain' || self.placement.colocation == 'None' || "
        f"self.rollout.gpusPerNode + self.trainer.gpusPerNode <= {GB200_NODE_GPUS}",
        "and rollout.gpusPerNode are more than a node's 4 GPUs; split them 2+2, 3+1 or 1+3",
        ".trainer.gpusPerNode",
    ),
    Cel(
        "gpu-split",
        "spec",
        "self.placement.colocation == 'None' || "
        "(self.rollout.gpusPerNode == 0) == (self.trainer.gpusPerNode == 0)",
        "is 0 for one role alone, but colocation splits a node's GPUs; split them 2+2, 3+1 or 1+3, or write "
        "placement.colocation: None",
        ".trainer.gpusPerNode",
    ),
    *(
        Cel(
            "gpus-by-field",
            f"spec.{role}.resources.{part}",
            "!('nvidia.com/gpu' in self)",
            _GPUS_BY_FIELD,
        )
        for role in ("rollout", "trainer")
        for part in ("requests", "limits")
    ),
    *(
        Cel(
            "template-life",
            f"spec.{role}.template.spec",
            f"!has(self.{name})",
            f"would end the pods behind the job's back; write {own}",
            f".{name}",
        )
        for role in ("rollout", "trainer")
        for name, own in OWN_FIELDS.items()
    ),
    Cel(
        "one-topology",
        "spec.placement.topology",
        "!(has(self.required) && has(self.preferred))",
        "has both required and preferred; remove one of them",
    ),
    Cel(
        "disk-sync-is-shared",
        "spec",
        "self.trainer.weightSync != 'Disk' || (self.rollout.nodes <= 1 && self.trainer.nodes <= 1) || "
        "(has(self.output.uri) && self.output.uri.startsWith('pvc://'))",
        "is Disk for several nodes, which share no directory; write Distributed, or output.uri: "
        "pvc://CLAIM/PATH",
        ".trainer.weightSync",
    ),
    Cel(
        "shards-are-shared",
        "spec",
        "self.trainer.checkpoint.state != 'Sharded' || self.trainer.nodes <= 1 || "
        "(has(self.output.uri) && self.output.uri.matches('^(pvc|file)://'))",
        "is Sharded for trainers of several nodes, which share no directory; write Full, or output.uri: "
        "pvc://CLAIM/PATH",
        ".trainer.checkpoint.state",
    ),
    Cel(
        "output-scheme",
        "spec.output",
        "!has(self.uri) || self.uri.matches('^(pvc|s3|file)://')",
        "is not an output URL; write pvc://CLAIM/PATH, s3://BUCKET/PREFIX or file:///PATH",
        ".uri",
    ),
    Cel(
        "output-scheme",
        "spec.output",
        "!has(self.uri) || !self.uri.startsWith('pvc://') || "
        "self.uri.matches('^pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/|$)')",
        "names no claim; write pvc://CLAIM/PATH",
        ".uri",
    ),
    Cel(
        "output-scheme",
        "spec.output",
        f"!has(self.uri) || {_NAMES_BUCKET}",
        "names no bucket; write s3://BUCKET/PREFIX",
        ".uri",
    ),
    Cel(
        "output-scheme",
        "spec.output",
        f"!has(self.uri) || {_ABSOLUTE_FILE}",
        "is not an absolute path; write file:///PATH",
        ".uri",
    ),
    Cel(
        "output-scheme",
        "spec.output",
        "!has(self.uri) || !self.uri.matches('/[.][.](/|$)')",
        "leaves its place by ..; write pvc://CLAIM/PATH, s3://BUCKET/PREFIX or file:///PATH",
        ".uri",
    ),
    *_s3_options("output-credentials", "spec.output"),
    Cel(
        "ring-fits-memory",
        "spec",
        "self.transport.onlyObject || !('memory' in self.rollout.resources.limits) || !"
        + _less("self.rollout.resources.limits['memory']", _quantity("self.transport.ring.size")),
        "is more than the rollout's memory limit that it counts in; write at most that, or raise the limit",
        ".transport.ring.size",
    ),
    Cel(
        "ring-has-segments",
        "spec.transport",
        "self.onlyObject || !" + _less("self.ring.size", "quantity('1Mi')"),
        "is too little for 16 segments of 64Ki; write at least 1Mi, or onlyObject: true",
        ".ring.size",
    ),
    Cel(
        "nothing-to-spill",
        "spec.transport",
        "!self.onlyObject || (self.spill == 'Never' && !has(self.spillPath))",
        "with onlyObject there is no ring to spill; write spill: Never and no spillPath",
    ),
    Cel(
        "spill-has-a-place",
        "spec.transport",
        "self.spill != 'ObjectStore' || self.onlyObject || has(self.object.uri)",
        "is ObjectStore, but no object store is named; write object.uri: s3://BUCKET/PREFIX",
        ".spill",
    ),
    Cel(
        "spill-directory",
        "spec.transport",
        "!has(self.spillPath) || self.spillPath.startsWith('/')",
        "is not an absolute path; write that of a directory on a local disk",
        ".spillPath",
    ),
    Cel(
        "spill-directory",
        "spec.transport",
        "!has(self.spillLimit) || has(self.spillPath)",
        "limits spillPath, which is not set; remove it, or write spillPath",
        ".spillLimit",
    ),
    Cel(
        "spill-directory",
        "spec.transport",
        f"!has(self.spillLimit) || {_SEGMENTS}.all(size, "
        f"(size > {_SEGMENTS[0]} && {_quantity('self.ring.size')}.asInteger() / 32 < size) || "
        f"{_quantity('self.spillLimit')}.asInteger() >= size)",
        "is less than one segment of the ring; write at least a 32nd of ring.size",
        ".spillLimit",
    ),
    Cel(
        "retention-of-objects",
        "spec.transport",
        "self.object.retention == 'Trained' || self.onlyObject",
        "keeps frames, but those in a ring go when they are trained; write Trained, or onlyObject: true",
        ".object.retention",
    ),
    Cel(
        "object-size",
        "spec.transport.object.batchSize",
        "!" + _less("self", "quantity('4Ki')") + " && !quantity('1Gi').isLessThan(quantity(string(self)))",
        "is no sensible size of an object; write 4Ki to 1Gi, for example 8Mi",
    ),
    Cel(
        "object-store-url",
        "spec.transport.object",
        "!has(self.uri) || (self.uri.matches('^[a-z][a-z0-9+.-]*://') && !self.uri.startsWith('memory://'))",
        "is not the URL of a store that all pods reach; write s3://BUCKET/PREFIX or file:///PATH",
        ".uri",
    ),
    Cel(
        "object-store-url",
        "spec.transport.object",
        f"!has(self.uri) || {_ABSOLUTE_FILE}",
        "is not an absolute path; write file:///PATH",
        ".uri",
    ),
    Cel(
        "object-store-url",
        "spec.transport.object",
        f"!has(self.uri) || {_NAMES_BUCKET}",
        "names no bucket; write s3://BUCKET/PREFIX",
        ".uri",
    ),
    *_s3_options("object-store-url", "spec.transport.object"),
    Cel(
        "managed-by-name",
        "spec",
        "!has(self.managedBy) || self.managedBy.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9_.~-]+$')",
        "is not domain/path; write for example kueue.x-k8s.io/multikueue, or remove it",
        ".managedBy",
    ),
)
