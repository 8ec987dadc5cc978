"""Bad manifests: every fault is found at its path and says what to write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tracerl.api.errors import Fault, InputError
from tracerl.api.job import TraceRLJob
from tracerl.api.load import apply_overrides, check, load_job
from tracerl.api.machine import Machine
from tracerl.api.model import BUILTIN_MODELS, ModelShape
from tracerl.api.ring import segment_size
from tracerl.api.rules import RULES, Facts
from tracerl.api.support import SUPPORT_RULES


def test_the_shortest_manifest_runs(manifest: dict[str, Any]) -> None:
    assert check(manifest) == []


def by_path(faults: list[Fault]) -> dict[str, str]:
    return {fault.path: f"{fault.problem}; {fault.remedy}" for fault in faults}


APART = ["spec.placement.colocation=None"]
EXACT = ["spec.rollout.engine=SGLang", "spec.trainer.engine=Megatron"]


# Overrides that break the shortest manifest -> where -> what the line says.
BAD: list[tuple[list[str], str, str]] = [
    # one field
    (["spec.algorithm.steps=0"], "spec.algorithm.steps", "is 0; write at least 1"),
    (["spec.algorithm.steps=3.0"], "spec.algorithm.steps", "write a whole number"),
    (["spec.algorithm.steps='3'"], "spec.algorithm.steps", 'is "3"; write a whole number'),
    (["spec.algorithm.steps=true"], "spec.algorithm.steps", "is true; write a whole number"),
    (["spec.algorithm.steps=null"], "spec.algorithm.steps", "is empty"),
    (["spec.algorithm.maxVersionDiff=-1"], "spec.algorithm.maxVersionDiff", "is -1; write at least 0"),
    (["spec.algorithm.routingReplay=1"], "spec.algorithm.routingReplay", "write true or false"),
    (["spec.algorithm.temperature='0'"], "spec.algorithm.temperature", 'write more than "0"'),
    (["spec.algorithm.temperature=true"], "spec.algorithm.temperature", "decimal in quotes"),
    (["spec.algorithm.temperature='NaN'"], "spec.algorithm.temperature", "not a decimal number"),
    (["spec.algorithm.clipLow='1.5'"], "spec.algorithm.clipLow", 'write at most "1"'),
    (
        ["spec.algorithm.importanceSampling.upper='0.5'"],
        "spec.algorithm.importanceSampling.upper",
        "at least",
    ),
    (["spec.algorithm={steps: 3}"], "spec.algorithm.promptsPerStep", "is missing; add promptsPerStep: 16"),
    (["spec.method.name=trace"], "spec.method.name", "write TRACE"),
    (["spec.method.name=PPO"], "spec.method.name", "write one of BF16, Vanilla, QAT, TRACE"),
    (["spec.method.name=3"], "spec.method.name", "BF16, Vanilla, QAT, TRACE"),
    (["spec.algorithm.name=PPO"], "spec.algorithm.name", "write GRPO"),
    (["spec.method.trace.codeBits=3"], "spec.method.trace.codeBits", "write one of 0, 1, 2, 4"),
    (["spec.method.trace.codeBits=true"], "spec.method.trace.codeBits", "write a number of bits"),
    (["spec.method.trace.driftBand='0.6'"], "spec.method.trace.driftBand", 'write at most "0.5"'),
    (["spec.records.maxMissingRatio='1.1'"], "spec.records.maxMissingRatio", 'write at most "1"'),
    (["spec.trainer.optimizer.beta2='1'"], "spec.trainer.optimizer.beta2", 'write less than "1"'),
    (
        ["spec.trainer.optimizer.learningRate='1e-999'"],
        "spec.trainer.optimizer.learningRate",
        "not a decimal",
    ),
    (
        ["spec.trainer.optimizer={learningRate: 1e-3, epsilon: 1e-3.0}"],
        "spec.trainer.optimizer.epsilon",
        "not a decimal",
    ),
    (["spec.transport.ring.size=256MB"], "spec.transport.ring.size", 'for example "256Mi"'),
    (["spec.transport.ring.size=-5"], "spec.transport.ring.size", 'for example "256Mi"'),
    (["spec.transport.ring.size=NaNMi"], "spec.transport.ring.size", 'for example "256Mi"'),
    (["spec.transport.ring.size=[1]"], "spec.transport.ring.size", 'for example "256Mi"'),
    (["spec.rollout.resources.limits.cpu=two"], "spec.rollout.resources.limits.cpu", '"500m"'),
    (["spec.rollout.resources.limits={rdma/ib: [1]}"], "spec.rollout.resources.limits.rdma/ib", "a quantity"),
    (["spec.quantization.targets=[]"], "spec.quantization.targets", "is empty"),
    (["spec.quantization.targets=KVCache"], "spec.quantization.targets", "write a list"),
    (["spec.quantization.targets=[KVCach]"], "spec.quantization.targets[0]", "write KVCache"),
    (["spec.task.reward=my reward"], "spec.task.reward", "module:function"),
    (["metadata.name=My_Job"], "metadata.name", "lower-case letters, digits and dashes"),
    (["metadata.name=" + "a" * 51], "metadata.name", "write at most 50"),
    (["spec.model=builtin://tiny-moe"], "spec.model", "for example {uri: builtin://tiny-moe}"),
    (["spec.trainer=null"], "spec.trainer", "is empty; remove it"),
    (["kind=Job"], "kind", "write TraceRLJob"),
    (["apiVersion=tracerl.dev/v1"], "apiVersion", "write tracerl.dev/v1alpha1"),
    # URLs and names
    *(
        (
            [f"{path}='{url}'"],
            path,
            "holds credentials, which everybody could read with the job; write the URL",
        )
        for path in ("spec.output.uri", "spec.transport.object.uri", "spec.model.uri")
        for url in ("s3://AK:SECRET@bucket/a", "s3://AK:SEC/RET@bucket", "s3://SECRET@bucket")
    ),
    (["spec.model.tokenizerUri='https://SECRET@host/x'"], "spec.model.tokenizerUri", "holds credentials"),
    (['spec.output.uri="s3://bucket/a\\nb"'], "spec.output.uri", "holds a control character; remove it"),
    (['spec.trainer.image="a\\tb"'], "spec.trainer.image", "holds a control character"),
    (
        ['spec.output={uri: "s3://b-1/r", secretName: "s\\0"}'],
        "spec.output.secretName",
        "holds a control character",
    ),
    # model and task
    (["spec.model.uri=Qwen/Qwen3-30B-A3B"], "spec.model.uri", "hf://ORG/NAME"),
    (["spec.model.uri=builtin://tiny_moe"], "spec.model.uri", "write builtin://tiny-moe"),
    (["spec.model.uri=file:///nowhere"], "spec.model.uri", "No such file or directory"),
    (["spec.task.uri=file:///t.jsonl"], "spec.task", "has both name and uri; remove one"),
    (["spec.task={}"], "spec.task", "has neither name nor uri"),
    (["spec.task={uri: 'file:///t.jsonl'}"], "spec.task.reward", "write reward: module:function"),
    (["spec.task={uri: 'a', reward: 'm:f', parameters: {a: 1}}"], "spec.task.parameters", "remove them"),
    (["spec.task.name=chain_sum"], "spec.task.name", "write builtin/chain_sum or reasoning_gym/DATASET"),
    (["spec.task.reward=m:f"], "spec.task.reward", "remove reward"),
    (["spec.task.source.uri=r.py"], "spec.task.source", "remove source"),
    (
        ["spec.task={uri: 'a', reward: 'm:f', source: {uri: r.py, configMap: r}}"],
        "spec.task.source",
        "has both configMap and uri; remove one",
    ),
    # algorithm
    (["spec.algorithm.samplesPerPrompt=1"], "spec.algorithm.samplesPerPrompt", "write 2 or more"),
    (
        ["spec.algorithm.miniBatches=6"],
        "spec.algorithm.miniBatches",
        "the 128 trajectories of a step; write a div",
    ),
    (["spec.task.heldOutPrompts=10"], "spec.algorithm.evaluation.prompts", "write at most 10"),
    (
        ["spec.algorithm.evaluation.prompts=0", "spec.expect.minReward=0.5"],
        "spec.expect.minReward",
        "write spec.algorithm.evaluation.prompts: 256",
    ),
    (["spec.method.name=QAT", "spec.expect.maxGapRatio=0.5"], "spec.expect.maxGapRatio", "use maxGap"),
    (
        ["spec.algorithm.maxResponseTokens=100"],
        "spec.algorithm.maxResponseTokens",
        "context is 128; write at most 64",
    ),
    (["spec.rollout.kvCacheTokens=79"], "spec.rollout.kvCacheTokens", "write at least 80"),
    (["spec.trainer.microBatchTokens=79"], "spec.trainer.microBatchTokens", "write at least 80"),
    # quantisation and method
    (["spec.quantization.targets=[KVCache, KVCache]"], "spec.quantization.targets", "names KVCache twice"),
    (
        ["spec.quantization.secondInput=Recorded", "spec.method.name=QAT"],
        "spec.quantization.secondInput",
        "write RTN, or spec.method.name: TRACE",
    ),
    (
        ["spec.quantization.secondInput=Recorded", "spec.quantization.targets=[KVCache]"],
        "spec.quantization.secondInput",
        "add RoutedExperts",
    ),
    (
        ["spec.quantization.format=MXFP4", "spec.quantization.tensorScale=PerToken"],
        "spec.quantization.tensorScale",
        "MXFP4 has no tensor scale; write Fixed",
    ),
    (
        ["spec.method={name: QAT, trace: {}}"],
        "spec.method.trace",
        "remove it, or write spec.method.name: TRACE",
    ),
    (["spec.method.trace={codeBits: 0, scaleBits: 0}"], "spec.method.trace", "or spec.method.name: QAT"),
    (
        ["spec.method.trace.layers.policy=Last"],
        "spec.method.trace.layers.last",
        "write the number of last layers",
    ),
    (["spec.method.trace.layers.last=2"], "spec.method.trace.layers.last", "write policy: Last"),
    (["spec.method.trace.layers.policy=List"], "spec.method.trace.layers.indices", "counted from 0"),
    (["spec.method.trace.layers.indices=[1]"], "spec.method.trace.layers.indices", "write policy: List"),
    (
        ["spec.method.trace.layers={policy: List, indices: [1, 1]}"],
        "spec.method.trace.layers.indices",
        "write each index once",
    ),
    (
        ["spec.method.trace.layers={policy: Last, last: 5}"],
        "spec.method.trace.layers.last",
        "the model has 4 layers; write at most 4",
    ),
    (
        ["spec.method.trace.layers={policy: List, indices: [0, 4]}"],
        "spec.method.trace.layers.indices[1]",
        "write at most 3",
    ),
    (["spec.method.name=BF16", "spec.records.auditEvery=4"], "spec.records.auditEvery", "write 0"),
    (["spec.method.name=QAT", "spec.observe.baselineEvery=4"], "spec.observe.baselineEvery", "write 0"),
    # machines
    (
        ["spec.rollout={engine: SGLang, numerics: Native}"],
        "spec.rollout.numerics",
        "the rollout has no GPU; write Emulated",
    ),
    (["spec.rollout.engineArgs={mem: 1}"], "spec.rollout.engineArgs", "remove them"),
    (["spec.trainer.engineArgs={mem: 1}"], "spec.trainer.engineArgs", "remove them"),
    (["spec.rollout={nodes: 3, nodesPerReplica: 2}"], "spec.rollout.nodes", "write a multiple of 2"),
    (
        [
            "spec.rollout={engine: SGLang, gpusPerNode: 2, nodes: 2, nodesPerReplica: 2}",
            "spec.rollout.parallelism.tensor=2",
        ],
        "spec.rollout.parallelism",
        "a replica has 4 GPUs; write for example tensor: 4",
    ),
    (
        ["spec.rollout={gpusPerNode: 4, parallelism: {tensor: 4, expert: 3}}"],
        "spec.rollout.parallelism.expert",
        "write a divisor of 4",
    ),
    (
        ["spec.trainer={engine: Megatron, gpusPerNode: 4, parallelism: {tensor: 2, data: 4}}"],
        "spec.trainer.parallelism",
        "= 8 ranks for 4 GPUs; write for example data: 2",
    ),
    (
        ["spec.trainer={gpusPerNode: 4, parallelism: {pipeline: 2, data: 2, expert: 4}}"],
        "spec.trainer.parallelism.expert",
        "write a divisor of 2",
    ),
    (
        ["spec.rollout.parallelism.expert=16"],
        "spec.rollout.parallelism.expert",
        "the model's 8 experts; write 1",
    ),
    (
        ["spec.rollout={engine: SGLang, parallelism: {tensor: 2}}"],
        "spec.rollout.parallelism.tensor",
        "hidden size 48 is 3 blocks of 16, and some block would lie on two of them; write 1, or",
    ),
    (
        ["spec.rollout={engine: SGLang, parallelism: {data: 2}}"],
        "spec.rollout.parallelism.data",
        "is 2, so that 2 ranks share an expert, whose hidden size 48 is 3 blocks of 16, and some block",
    ),
    (
        ["spec.rollout={engine: SGLang, parallelism: {tensor: 2, data: 2}}"],
        "spec.rollout.parallelism.tensor",
        "is 2, so that 4 ranks share an expert, whose hidden size 48 is 3 blocks of 16, and some block would "
        "lie on two of them; write 1 and spec.rollout.parallelism.data: 1, or spec.quantization.targets: [K",
    ),
    (
        [
            "spec.rollout={engine: SGLang, kvCacheTokens: 1000, parallelism: {data: 3}}",
            "spec.algorithm.maxPromptTokens=300",
            "spec.algorithm.maxResponseTokens=100",
        ],
        "spec.rollout.kvCacheTokens",
        "is 1000, of which each of the 3 units of spec.rollout.parallelism.data has its part, less than one "
        "trajectory of maxPromptTokens + maxResponseTokens = 400; write at least 1200",
    ),
    (
        ["spec.rollout={engine: SGLang, parallelism: {tensor: 3}}"],
        "spec.rollout.parallelism.tensor",
        "neither a divisor nor a multiple of the model's 2 key-value heads; write 1",
    ),
    (
        ["spec.rollout={engine: SGLang, parallelism: {expert: 2}}"],
        "spec.rollout.parallelism.expert",
        "the rollout's ranks, 1; write a divisor of 1, or spec.rollout.parallelism.tensor: 2",
    ),
    (["spec.trainer.nodes=2"], "spec.trainer.nodes", "write 1, or spec.placement.colocation: None"),
    (
        ["spec.rollout.nodes=2"],
        "spec.trainer.nodes",
        "write 2 and spec.trainer.parallelism.data: 2, or spec.placement.colocation: None",
    ),
    (
        ["spec.rollout.nodes=2", "spec.trainer.parallelism.data=4"],
        "spec.trainer.nodes",
        "write 2, or spec.placement.colocation: None",
    ),
    (
        ["spec.rollout.nodes=2", "spec.trainer={nodes: 2, parallelism: {data: 3}}"],
        "spec.trainer.nodes",
        "the 3 ranks of spec.trainer.parallelism; write for example spec.trainer.parallelism.data: 2",
    ),
    (
        ["spec.rollout={gpusPerNode: 4, parallelism: {tensor: 4}}"],
        "spec.trainer.gpusPerNode",
        "2+2, 3+1 or 1+3, or write spec.placement.colocation: None",
    ),
    (
        ["spec.trainer={gpusPerNode: 4, parallelism: {data: 4}}"],
        "spec.rollout.gpusPerNode",
        "2+2, 3+1 or 1+3",
    ),
    (
        [
            "spec.placement.fabric=ComputeDomain",
            "spec.rollout={gpusPerNode: 3, parallelism: {tensor: 3}}",
            "spec.trainer={gpusPerNode: 2, parallelism: {data: 2}}",
        ],
        "spec.trainer.gpusPerNode",
        "5 together, but a node has 4 GPUs; split them 2+2, 3+1 or 1+3",
    ),
    (
        ["spec.placement={fabric: ComputeDomain, colocation: None}", "spec.rollout={gpusPerNode: 8}"],
        "spec.rollout.gpusPerNode",
        "write at most 4",
    ),
    (
        ["spec.trainer.resources.limits={nvidia.com/gpu: 4}"],
        "spec.trainer.resources.limits",
        "write spec.trainer.gpusPerNode",
    ),
    (
        ["spec.rollout.template={spec: {activeDeadlineSeconds: 5}}"],
        "spec.rollout.template.spec.activeDeadlineSeconds",
        "write spec.activeDeadlineSeconds",
    ),
    (
        ["spec.trainer.template={ttlSecondsAfterFinished: 5}"],
        "spec.trainer.template.ttlSecondsAfterFinished",
        "write spec.ttlSecondsAfterFinished",
    ),
    (
        ["spec.trainer.template={containers: []}"],
        "spec.trainer.template.containers",
        "write metadata or spec",
    ),
    (
        ["spec.placement.topology={required: a, preferred: b}"],
        "spec.placement.topology",
        "remove one of them",
    ),
    (
        ["spec.trainer={weightSync: Disk, nodes: 2}", "spec.rollout.nodes=2"],
        "spec.trainer.weightSync",
        "output.uri: pvc://CLAIM/PATH",
    ),
    (
        ["spec.trainer={checkpoint: {state: Sharded}, nodes: 2}", "spec.output.uri=s3://runs"],
        "spec.trainer.checkpoint.state",
        "is Sharded for trainers of 2 nodes, which share no directory; write Full, or spec.output.uri: pvc:",
    ),
    (
        ["spec.trainer={checkpoint: {state: Sharded}, nodes: 2}"],
        "spec.trainer.checkpoint.state",
        "share no directory",
    ),
    (["spec.trainer.checkpoint.state=Whole"], "spec.trainer.checkpoint.state", "write one of Full, Sharded"),
    (["spec.output.uri=runs"], "spec.output.uri", "write pvc://CLAIM/PATH"),
    (["spec.output.uri=pvc://"], "spec.output.uri", "names '', which is no claim"),
    (["spec.output.uri=pvc://My_Claim/runs"], "spec.output.uri", "which is no claim"),
    (["spec.output.uri=pvc://runs/../other"], "spec.output.uri", "leaves its place by .."),
    (["spec.output.uri=s3:///runs"], "spec.output.uri", "which is no bucket"),
    (["spec.output.uri=file://runs"], "spec.output.uri", "not an absolute path; write file:///PATH"),
    (["spec.output.uri=file:///runs/.."], "spec.output.uri", "leaves its place by .."),
    (
        ["spec.output={uri: 'pvc://runs/a', secretName: s3}"],
        "spec.output.secretName",
        "is for S3, but output.uri is not an s3:// URL",
    ),
    (["spec.output={secretName: s3}"], "spec.output.secretName", "remove it, or write uri: s3://"),
    (
        ["spec.output={uri: 'file:///r', endpointUrl: 'http://minio:9000'}"],
        "spec.output.endpointUrl",
        "is for S3, but output.uri is not an s3:// URL",
    ),
    (
        ["spec.output={uri: 's3://b-1/r', endpointUrl: 'minio:9000'}"],
        "spec.output.endpointUrl",
        "not an http or https URL; write for example",
    ),
    (
        ["spec.output={uri: 's3://b-1/r', endpointUrl: 'http://me:secret@minio:9000'}"],
        "spec.output.endpointUrl",
        "holds a user name or a password, which everybody could read",
    ),
    # transport
    (
        ["spec.transport={ring: {size: 2Gi}}", "spec.rollout.resources.limits.memory=1Gi"],
        "spec.transport.ring.size",
        "write at most 1Gi, or raise the limit",
    ),
    (["spec.transport={ring: {size: 1000Ki}}"], "spec.transport.ring.size", "write at least 1Mi"),
    (
        ["spec.transport={spill: ObjectStore}"],
        "spec.transport.spill",
        "no object store is named; write spec.transport.object.uri: s3://BUCKET/PREFIX",
    ),
    (["spec.transport={spillPath: nvme}"], "spec.transport.spillPath", "not an absolute path; write the"),
    (["spec.transport={spillLimit: 1Gi}"], "spec.transport.spillLimit", "remove it, or write spillPath"),
    (
        ["spec.transport={spillPath: /nvme, spillLimit: 8191Ki}"],
        "spec.transport.spillLimit",
        "less than one segment of the ring; write at least 8192Ki",
    ),
    (
        ["spec.transport={object: {retention: Job}}"],
        "spec.transport.object.retention",
        "write Trained, or onlyObject: true",
    ),
    (["spec.transport.object.batchSize=2Gi"], "spec.transport.object.batchSize", "write 4Ki to 1Gi"),
    (["spec.transport.object.batchSize=0"], "spec.transport.object.batchSize", "write 4Ki to 1Gi"),
    (
        ["spec.transport={onlyObject: true, spill: ObjectStore}"],
        "spec.transport.spill",
        "write Never, or onlyObject: false",
    ),
    (
        ["spec.transport={onlyObject: true, spillPath: /nvme}"],
        "spec.transport.spillPath",
        "there is no ring to spill",
    ),
    (["spec.transport.object.uri=bucket"], "spec.transport.object.uri", "write s3://BUCKET/PREFIX"),
    (["spec.transport.object.uri='memory://r'"], "spec.transport.object.uri", "others do not see; write s3"),
    (["spec.transport.object.uri='file://r'"], "spec.transport.object.uri", "write file:///PATH"),
    (["spec.transport.object.uri='s3:///r'"], "spec.transport.object.uri", "names '', which is no bucket"),
    (
        ["spec.transport.object={uri: 's3://b-1/r', endpointUrl: 'minio:9000'}"],
        "spec.transport.object.endpointUrl",
        "is 'minio:9000', not an http or https URL; write for example http://minio:9000",
    ),
    (
        ["spec.transport.object={uri: 's3://b-1/r', endpointUrl: 'http://user:SECRET@minio:9000'}"],
        "spec.transport.object.endpointUrl",
        "holds a user name or a password, which everybody could read with the job; write the URL without",
    ),
    (
        ["spec.transport.object={uri: 's3://b-1/r', endpointUrl: 'https://token@minio/x@y'}"],
        "spec.transport.object.endpointUrl",
        "holds a user name",
    ),
    (["spec.transport.object.secretName=s3"], "spec.transport.object.secretName", "write uri: s3://"),
    (
        ["spec.transport.object={uri: 'file:///r', endpointUrl: 'http://minio'}"],
        "spec.transport.object.endpointUrl",
        "is for S3",
    ),
    (["spec.managedBy=kueue"], "spec.managedBy", "kueue.x-k8s.io/multikueue"),
    # what this version does not run
    (["spec.trainer.engine=Verl"], "spec.trainer.engine", "write Reference or Megatron"),
    (
        [
            "spec.rollout={engine: SGLang, parallelism: {tensor: 2, expert: 2}}",
            "spec.quantization.secondInput=RTN",
        ],
        "spec.rollout.parallelism.expert",
        "is 2, but a quantised second input is emulated where all experts are; write 1, or spec.quantization",
    ),
    (
        [
            "spec.rollout={engine: SGLang, parallelism: {tensor: 2}}",
            "spec.quantization.secondInput=Recorded",
        ],
        "spec.rollout.parallelism.tensor",
        "is 2, so that every rank would have a part of the recorded second input; write 1, or spec.quant",
    ),
    (
        ["spec.rollout={engine: SGLang, parallelism: {data: 2}}", "spec.quantization.secondInput=Recorded"],
        "spec.rollout.parallelism.data",
        "is 2, so that every rank would have a part of the recorded second input; write 1, or spec.quant",
    ),
    (
        [
            "spec.rollout={engine: SGLang, gpusPerNode: 2, numerics: Native, parallelism: {data: 2}}",
            *APART,
        ],
        "spec.rollout.parallelism.data",
        "is 2, but the codes of one rank's rows cannot be told from the others'; write 1, or spec.rollout",
    ),
    (
        [
            "spec.rollout={engine: SGLang, gpusPerNode: 1, numerics: Native}",
            "spec.quantization.secondInput=Recorded",
            *APART,
        ],
        "spec.quantization.secondInput",
        "is Recorded, but FP4 kernels do not show their second input; write RTN, or spec.rollout.numerics",
    ),
    (
        [
            "spec.rollout={engine: SGLang, gpusPerNode: 1, numerics: Native}",
            "spec.records.auditEvery=8",
            *APART,
        ],
        "spec.records.auditEvery",
        "is 8, but whole codes of all layers stay on the device; write 0, or spec.rollout.numerics: Emulated",
    ),
    (
        ["spec.rollout={gpusPerNode: 2, parallelism: {tensor: 2}}", "spec.placement.colocation=None"],
        "spec.rollout.gpusPerNode",
        "is 2, which this version does not run with Reference (it is one process); write 0 or 1",
    ),
    (
        ["spec.trainer={gpusPerNode: 2, parallelism: {data: 2}}", *APART],
        "spec.trainer.gpusPerNode",
        "is 2, which this version does not run with Reference (it is one process); write 0 or 1",
    ),
    (
        ["spec.rollout.nodes=2", "spec.rollout.nodesPerReplica=2", "spec.placement.colocation=None"],
        "spec.rollout.nodesPerReplica",
        "write 1",
    ),
    (
        ["spec.trainer.parallelism.pipeline=2"],
        "spec.trainer.parallelism.pipeline",
        "does not run with Reference (every trainer process holds the whole model); write 1",
    ),
    (
        ["spec.trainer={engine: Megatron, parallelism: {pipeline: 3}}"],
        "spec.trainer.parallelism.pipeline",
        "is 3, which does not divide the model's 4 layers; write a divisor of 4",
    ),
    (
        ["spec.trainer.parallelism={tensor: 2}"],
        "spec.trainer.parallelism.tensor",
        "does not run with Reference (every trainer process holds the whole model); write 1",
    ),
    (
        ["spec.trainer={engine: Megatron, parallelism: {tensor: 4}}"],
        "spec.trainer.parallelism.tensor",
        "does not divide the model's 2 KV heads; write a divisor of 2",
    ),
    (
        ["spec.trainer.parallelism={expert: 2, data: 2}"],
        "spec.trainer.parallelism.expert",
        "does not run with Reference (every trainer process holds the whole model); write 1",
    ),
    (
        ["spec.trainer={engine: Megatron, parallelism: {expert: 2, data: 3}}"],
        "spec.trainer.parallelism.expert",
        "the 3 ranks of a pipeline stage; write a divisor of 3, or spec.trainer.parallelism.data: 2",
    ),
    (["spec.quantization.format=MXFP4"], "spec.quantization.format", "write NVFP4"),
    (["spec.quantization.tensorScale=PerToken"], "spec.quantization.tensorScale", "write Fixed"),
    (
        [
            "spec.trainer.parallelism.data=9",
            "spec.algorithm.promptsPerStep=2",
            "spec.algorithm.samplesPerPrompt=4",
        ],
        "spec.trainer.parallelism.data",
        "write at most 8",
    ),
    (["spec.trainer.parallelism.context=2"], "spec.trainer.parallelism.context", "write 1"),
    (["spec.rollout.parallelism.data=2"], "spec.rollout.parallelism.data", "write 1"),
    (
        ["spec.quantization.prefillAttends=Exact", "spec.rollout.engine=SGLang"],
        "spec.quantization.prefillAttends",
        "runs only with SGLang's Emulated numerics and Megatron",
    ),
    (
        ["spec.quantization={prefillAttends: Exact, targets: [RoutedExperts]}", *EXACT],
        "spec.quantization.prefillAttends",
        "keys and values are not quantised, so it changes nothing; remove it, or write spec.quant",
    ),
    (["spec.observe.baselineEvery=2"], "spec.observe.baselineEvery", "or spec.algorithm.maxVersionDiff: 0"),
    (
        ["spec.observe.baselineEvery=999999"],
        "spec.observe.baselineEvery",
        "compares 0 of 30 steps, too few for an interval; write at most 10, or 0",
    ),
    (
        ["spec.observe.baselineEvery=1", "spec.algorithm.steps=3"],
        "spec.observe.baselineEvery",
        "compares 2 of 3 steps, too few for an interval; write spec.algorithm.steps: 4, or 0",
    ),
    (
        ["spec.observe.baselineEvery=2", "spec.algorithm.staleness=Drop"],
        "spec.observe.baselineEvery",
        "or spec.algorithm.staleness: Wait",
    ),
    (
        ["spec.observe.baselineEvery=2", "spec.records.auditEvery=4"],
        "spec.observe.baselineEvery",
        "or spec.records.auditEvery: 0",
    ),
    (
        [
            "spec.observe.baselineEvery=2",
            "spec.rollout={engine: SGLang, gpusPerNode: 1, numerics: Native}",
            *APART,
        ],
        "spec.observe.baselineEvery",
        "or spec.rollout.numerics: Emulated",
    ),
    (
        ["spec.observe.baselineEvery=2", "spec.rollout={engine: SGLang, gpusPerNode: 1}", *APART],
        "spec.observe.baselineEvery",
        "a rollout that says what it took of a GPU; write 0, or spec.rollout.gpusPerNode: 0",
    ),
    (
        ["spec.observe.baselineEvery=2", "spec.trainer.engine=Megatron"],
        "spec.observe.baselineEvery",
        "or spec.trainer.engine: Reference",
    ),
    (
        [
            "spec.observe.baselineEvery=2",
            *("spec.rollout.nodes=2", "spec.trainer.nodes=2", "spec.trainer.parallelism.data=2"),
        ],
        "spec.observe.baselineEvery",
        "or spec.trainer.parallelism.data: 1",
    ),
    (
        ["spec.observe.baselineEvery=2", "spec.trainer.gpusPerNode=1", "spec.placement.colocation=None"],
        "spec.observe.baselineEvery",
        "comparing steps needs GPUs on both sides or on none; write 0, or spec.trainer.gpusPerNode as",
    ),
    (["spec.model.uri=hf://Qwen/Qwen3-30B-A3B"], "spec.model.uri", "write builtin://NAME, or file:///PATH"),
]


@pytest.mark.parametrize(("overrides", "path", "fragment"), BAD, ids=lambda value: str(value)[:60])
def test_fault(manifest: dict[str, Any], overrides: list[str], path: str, fragment: str) -> None:
    faults = check(apply_overrides(manifest, overrides))
    assert path in by_path(faults), faults
    assert any(f.path == path and fragment in f"{f.problem}; {f.remedy}" for f in faults), faults
    assert all(fault.remedy for fault in faults)


@pytest.mark.parametrize("uid", ["..", "a/b", "", "-a", "a-", "a.b", "a\n", "ä", "a" * 65])
def test_a_uid_names_directories(manifest: dict[str, Any], uid: str) -> None:
    """An API server gives it, so the CustomResourceDefinition does not check it."""
    manifest["metadata"]["uid"] = uid
    found = by_path(check(manifest))["metadata.uid"]
    assert "letters, digits and dashes" in found or "write at most 64" in found
    manifest["metadata"]["uid"] = "0b5e9d3c-9d7c-4b8e-A3b1-5f8d7a1c2e3f"
    assert check(manifest) == []


@pytest.mark.parametrize(
    ("overrides", "path", "remedy", "done"),
    [
        (
            ["spec.rollout.gpusPerNode=4"],
            "spec.rollout.parallelism",
            "write tensor: 1, data: 1, spec.rollout.gpusPerNode: 1 and nodesPerReplica: 1",
            ["spec.rollout.gpusPerNode=1"],
        ),
        (
            ["spec.rollout={gpusPerNode: 1, nodes: 2, nodesPerReplica: 2}"],
            "spec.rollout.parallelism",
            "write tensor: 1, data: 1, spec.rollout.gpusPerNode: 1 and nodesPerReplica: 1",
            ["spec.rollout.nodesPerReplica=1"],
        ),
        (
            ["spec.trainer={gpusPerNode: 4, nodes: 2}"],
            "spec.trainer.parallelism",
            "write tensor: 1, pipeline: 1, context: 1, data: 2 and spec.trainer.gpusPerNode: 1",
            ["spec.trainer.parallelism={data: 2}", "spec.trainer.gpusPerNode=1"],
        ),
        (
            ["spec.trainer={gpusPerNode: 1, nodes: 2, parallelism: {tensor: 4}}"],
            "spec.trainer.parallelism",
            "write tensor: 1, pipeline: 1, context: 1, data: 2",
            ["spec.trainer.parallelism={tensor: 1, data: 2}"],
        ),
    ],
)
def test_what_the_reference_engines_are_told_about_gpus_runs(
    manifest: dict[str, Any], overrides: list[str], path: str, remedy: str, done: list[str]
) -> None:
    """They are one process a GPU: whoever does what one line says meets no other one."""
    found = by_path(check(apply_overrides(manifest, [*overrides, *APART])))
    assert found[path].endswith(f"; {remedy}")
    assert check(apply_overrides(manifest, [*overrides, *APART, *done])) == []


@pytest.mark.parametrize("targets", ["[RoutedExperts, KVCache]", "[KVCache]"])
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-moe-deep"])
@pytest.mark.parametrize(
    ("role", "size"),
    [("rollout", {"tensor": size}) for size in (2, 3, 4, 5, 6)]
    + [("rollout", {"tensor": 3, "expert": 3}), ("rollout", {"tensor": 4, "expert": 2})]
    + [("trainer", {"tensor": size}) for size in (3, 4)]
    + [("trainer", {"data": 6, "expert": 3}), ("trainer", {"data": 12, "expert": 12})]
    + [("trainer", {"pipeline": 3})],
)
def test_a_size_that_a_remedy_names_is_not_refused_again(
    manifest: dict[str, Any], model: str, targets: str, role: str, size: dict[str, int]
) -> None:
    base = [
        f"spec.model.uri=builtin://{model}",
        f"spec.quantization={{targets: {targets}, secondInput: BF16}}",
        "spec.rollout.engine=SGLang",
        "spec.trainer.engine=Megatron",
        f"spec.{role}.parallelism={json.dumps(size)}",
    ]
    for path, text in by_path(check(apply_overrides(manifest, base))).items():
        words = text.partition("; write ")[2].partition(", or spec")[0].partition(" and spec")[0]
        named = [int(number) for number in re.findall(r"\d+", words)]
        if words.startswith("a divisor of"):
            named = [one for one in range(1, named[0] + 1) if named[0] % one == 0]
        assert named
        more = ["spec.rollout.parallelism.expert=1"] if "expert: 1" in text else []
        for value in named:
            assert path not in by_path(check(apply_overrides(manifest, [*base, f"{path}={value}", *more])))


def test_tensor_sizes_of_a_large_model(manifest: dict[str, Any], tmp_path: Path) -> None:
    """64 heads, 8 key-value heads, experts of 2048 in 128 blocks: whatever divides 64, here."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE.to_hf_config()))
    changes = [
        f"spec.model.uri=file://{tmp_path}",
        "spec.rollout={engine: SGLang, parallelism: {tensor: 24}}",
    ]
    found = by_path(check(apply_overrides(manifest, changes)))["spec.rollout.parallelism.tensor"]
    assert found.endswith("; write 1, 2, 4, 8, 16, 32 or 64, or spec.quantization.targets: [KVCache]")
    found = by_path(check(apply_overrides(manifest, [*changes, "spec.quantization.targets=[KVCache]"])))
    assert found["spec.rollout.parallelism.tensor"].endswith(
        " 64 attention heads; write 1, 2, 4, 8, 16, 32 or 64"
    )


def test_one_fault_says_how_many_nodes_a_trainer_has(manifest: dict[str, Any]) -> None:
    overrides = ["spec.rollout.nodes=2", "spec.trainer.nodes=3"]
    assert [*by_path(check(apply_overrides(manifest, overrides)))] == ["spec.trainer.nodes"]
    assert len(check(apply_overrides(manifest, overrides))) == 1


ON_A_MACHINE = [
    (
        ["spec.placement.fabric=ComputeDomain"],
        "spec.placement.fabric",
        "which only a cluster has; write Auto",
    ),
    (
        ["spec.placement.topology.required=rack"],
        "spec.placement.topology.required",
        "is there on a cluster only; remove it",
    ),
    (["spec.placement.topology.preferred=rack"], "spec.placement.topology.preferred", "a cluster only"),
    (["spec.placement.queue=team"], "spec.placement.queue", "is there on a cluster only; remove it"),
    (["spec.suspend=true"], "spec.suspend", "write false"),
    (["spec.model.uri=pvc://models/qwen"], "spec.model.uri", "write file:///PATH"),
    (
        ["spec.task={uri: 'a', reward: 'm:f', source: {configMap: r}}"],
        "spec.task.source.configMap",
        "write spec.task.source.uri",
    ),
    (
        ["spec.rollout={gpusPerNode: 2, parallelism: {tensor: 2}}", "spec.placement.colocation=None"],
        "spec.rollout.gpusPerNode",
        "this machine has 0",
    ),
    (
        ["spec.rollout.gpusPerNode=1", "spec.trainer.gpusPerNode=1"],
        "spec.rollout.gpusPerNode",
        "ask for 1 GPUs, but this machine has 0; write at most 0",
    ),
    ([], "spec.transport.ring.size", "write at most 64Mi"),
    (
        ["spec.transport={ring: {size: 40Mi}}", "spec.placement.colocation=None", "spec.rollout.nodes=2"],
        "spec.transport.ring.size",
        "is 40Mi for each of 2 nodes, but /dev/shm of this machine has 64Mi; write at most 32Mi",
    ),
    (["spec.rollout.nodes=17"], "spec.rollout.nodes", "of this one machine; write at most 16"),
    (
        ["spec.trainer={engine: Megatron, parallelism: {context: 1024}}"],
        "spec.trainer.parallelism",
        "makes 1024 ranks, each of them a process of this one machine; write sizes that make at most 64",
    ),
    (["spec.trainer.parallelism.data=65"], "spec.trainer.parallelism", "makes 65 ranks"),
    (
        ["spec.rollout={engine: SGLang, nodes: 2, parallelism: {tensor: 3, data: 11}}", *APART],
        "spec.rollout.parallelism",
        "makes 66 ranks",
    ),
    (["spec.transport={spillPath: /no/nvme}"], "spec.transport.spillPath", "no directory of this machine"),
    (
        ["spec.transport.object={uri: 's3://bucket', secretName: s3}"],
        "spec.transport.object.secretName",
        "remove it and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
    (
        ["spec.task={uri: 'no/words.jsonl', reward: 'm:f'}"],
        "spec.task.uri",
        f"is 'no/words.jsonl', which does not exist (relative to {Path.cwd()}); write the path of a file",
    ),
    (
        ["spec.task={uri: 'file:///no/words.jsonl', reward: 'm:f'}"],
        "spec.task.uri",
        "is 'file:///no/words.jsonl', which does not exist; write",
    ),
    (
        [f"spec.task={{uri: '/', reward: 'm:f', source: {{uri: '{'x' * 300}'}}}}"],
        "spec.task.source.uri",
        "which does not exist (relative to",
    ),
]


SMALL_RING = ["spec.transport={ring: {size: 1Mi}}", "spec.records.auditEvery=1"]
LARGE = ModelShape.uniform(
    61,
    hidden=7168,
    heads=64,
    kv_heads=8,
    head_dim=128,
    experts=256,
    top_k=8,
    expert_hidden=2048,
    vocab=129_280,
    context=131_072,
)


def test_a_ring_too_small_for_a_row(manifest: dict[str, Any], tmp_path: Path) -> None:
    """Which of the model's sites are recorded does not matter: the bound is over all of them."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE.to_hf_config()))
    document = apply_overrides(manifest, [*SMALL_RING, f"spec.model.uri=file://{tmp_path}"])
    found = by_path(check(document))["spec.transport.ring.size"]
    assert found == "is 1Mi, whose segments of 64Ki are too small for a row; write at least 32Mi"
    document["spec"]["transport"]["ring"]["size"] = "32Mi"
    assert "spec.transport.ring.size" not in by_path(check(document))


def test_rules_know_the_segments_of_a_ring() -> None:
    for ring in (1, 2**20, 2**21, 2**21 + 1, 3 * 2**20, 2**28, 2**31, 2**40):
        power = 1 << max(ring // 32, 1).bit_length() - 1
        assert segment_size(ring) == max(64 * 2**10, min(64 * 2**20, power))


def test_every_rule_is_broken_by_some_manifest(manifest: dict[str, Any]) -> None:
    """No rule is dead: each finds a fault in one of the manifests above."""
    machine = Machine(gpus=0, shared_memory=64 * 2**20)
    odd = ModelShape.uniform(
        4,
        hidden=40,
        heads=2,
        kv_heads=2,
        head_dim=20,
        experts=8,
        top_k=2,
        expert_hidden=24,
        vocab=64,
        context=128,
    ).model_copy(update={"moe_layers": (0, 1)})
    broken = set()
    for overrides, _, _ in [*BAD, *ON_A_MACHINE, (SMALL_RING, "", "")]:
        try:
            job = TraceRLJob.model_validate(apply_overrides(manifest, overrides))
        except ValidationError:
            continue
        for shape in (odd, LARGE):
            facts = Facts(job.spec, shape, machine)
            broken |= {rule.name for rule in (*RULES, *SUPPORT_RULES) if list(rule.check(facts))}
    assert {rule.name for rule in (*RULES, *SUPPORT_RULES)} == broken


def test_one_machine_runs_64_ranks_of_a_role(manifest: dict[str, Any]) -> None:
    changes = ["spec.trainer.parallelism.data=64", "spec.rollout.nodes=16", "spec.trainer.nodes=16"]
    machine = Machine(gpus=0, shared_memory=2**40)
    assert check(apply_overrides(manifest, changes), machine=machine) == []


@pytest.mark.parametrize(("trainer", "fault"), [("Reference", False), ("Megatron", True)])
def test_reference_engines_alone_share_a_gpu(manifest: dict[str, Any], trainer: str, fault: bool) -> None:
    changes = ["spec.rollout.gpusPerNode=1", f"spec.trainer={{gpusPerNode: 1, engine: {trainer}}}"]
    found = check(apply_overrides(manifest, changes), machine=Machine(gpus=1, shared_memory=2**40))
    assert ("spec.rollout.gpusPerNode" in {one.path for one in found}) == fault


@pytest.mark.parametrize(("gpus", "fault"), [(1, True), (2, False)])
def test_reference_trainers_share_no_gpu_with_each_other(
    manifest: dict[str, Any], gpus: int, fault: bool
) -> None:
    """Their gradients are added up over NCCL, which refuses two processes of one GPU."""
    changes = [
        "spec.rollout={gpusPerNode: 1, nodes: 2}",
        "spec.trainer={gpusPerNode: 1, nodes: 2, parallelism: {data: 2}}",
    ]
    found = check(apply_overrides(manifest, changes), machine=Machine(gpus=gpus, shared_memory=2**40))
    assert [one.path for one in found] == ["spec.trainer.nodes"] * fault


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        *[(None, 2), ("", 0), ("1", 1), ("0,1", 2), ("GPU-8c1", 1), ("0,1,2", 2)],
        *[("7", 0), ("7,0", 0), ("1,7,0", 1), ("-1", 0), ("GPU-8c1,7", 1)],
    ],
)
def test_a_machine_has_the_gpus_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: int
) -> None:
    files = [Path("/dev") / name for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(files))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Machine.here().gpus == gpus


def test_a_gpu_that_is_not_there_is_refused_by_where_it_is_named(
    manifest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    changes = ["spec.rollout.gpusPerNode=1", "spec.trainer.gpusPerNode=1"]
    found = by_path(check(apply_overrides(manifest, changes), machine=Machine.here()))
    assert "this machine has 0 in CUDA_VISIBLE_DEVICES; write at most 0" in found["spec.rollout.gpusPerNode"]


@pytest.mark.parametrize(("overrides", "path", "fragment"), ON_A_MACHINE, ids=lambda value: str(value)[:60])
def test_fault_of_this_machine(
    manifest: dict[str, Any], overrides: list[str], path: str, fragment: str
) -> None:
    document = apply_overrides(manifest, overrides)
    found = check(document, machine=Machine(gpus=0, shared_memory=64 * 2**20))
    assert any(f.path == path and fragment in f"{f.problem}; {f.remedy}" for f in found), found
    elsewhere = check(document)
    assert not any(f.path == path and fragment in f"{f.problem}; {f.remedy}" for f in elsewhere), elsewhere


@pytest.mark.parametrize(
    "overrides",
    [
        ["spec.rollout.gpusPerNode=1", "spec.trainer={gpusPerNode: 3, parallelism: {data: 3}}"],
        [
            "spec.rollout={gpusPerNode: 4, parallelism: {tensor: 2, data: 2, expert: 4}}",
            "spec.placement.colocation=None",
        ],
        ["spec.rollout.engine=SGLang", "spec.trainer.engine=Megatron"],
        [
            "spec.quantization.prefillAttends=Exact",
            "spec.rollout.engine=SGLang",
            "spec.trainer.engine=Megatron",
        ],
        [
            "spec.rollout={engine: SGLang, gpusPerNode: 2, parallelism: {tensor: 2}, numerics: Native}",
            "spec.model.uri=builtin://tiny-moe-deep",
            *APART,
        ],
        ["spec.trainer={engine: Megatron, gpusPerNode: 1, nodes: 2, parallelism: {data: 2}}", *APART],
        [
            "spec.trainer={engine: Megatron, gpusPerNode: 4, parallelism: {tensor: 2, data: 2, expert: 4}}",
            *APART,
        ],
        ["spec.trainer={engine: Megatron, parallelism: {tensor: 2, context: 2}}"],
        ["spec.quantization={prefillAttends: Exact, targets: [KVCache]}", *EXACT],
        # Methods are compared by one manifest, and under BF16 nothing is quantised anyway.
        [
            "spec.quantization={prefillAttends: Exact, targets: [RoutedExperts]}",
            "spec.method.name=BF16",
            *EXACT,
        ],
        ["spec.trainer={engine: Megatron, parallelism: {pipeline: 2, data: 2, expert: 2}}"],
        [
            "spec.rollout.nodes=2",
            "spec.trainer={engine: Megatron, nodes: 2, parallelism: {data: 2, expert: 2}}",
        ],
        ["spec.transport={ring: {size: 1Gi}}", "spec.rollout.resources.limits.memory=1Gi"],
        ["spec.rollout.nodes=2", "spec.trainer={nodes: 2, parallelism: {data: 4}}"],
        ["spec.placement.colocation=None", "spec.rollout.nodes=3"],
        [
            "spec.transport={spillPath: /nvme, spillLimit: 8Mi, spill: ObjectStore}",
            "spec.transport.object.uri=s3://bucket",
        ],
        ["spec.transport.object={uri: 's3://bucket/records', endpointUrl: 'https://minio:9000'}"],
        ["spec.transport={onlyObject: true, object: {uri: 'gs://bucket/records', retention: Forever}}"],
        ["spec.rollout.template={metadata: {labels: {a: b}}, spec: {tolerations: [{operator: Exists}]}}"],
        ["spec.transport={onlyObject: true, object: {uri: 's3://bucket/p', secretName: s3}}"],
        ["spec.task={uri: 's3://b/t.jsonl', reward: 'my.mod:score'}"],
        ["spec.method.trace.layers={policy: List, indices: [3, 0]}"],
        ["spec.method.trace={codeBits: 0, scaleBits: 8}"],
        ["spec.quantization.secondInput=Recorded"],
        ["spec.algorithm.maxVersionDiff=0"],
        [
            "spec.trainer={weightSync: Disk, nodes: 2, parallelism: {data: 2}}",
            "spec.rollout.nodes=2",
            "spec.output.uri=pvc://runs/a",
        ],
        ["spec.trainer.checkpoint.state=Sharded", "spec.output.uri=s3://runs"],
        [
            "spec.trainer={checkpoint: {state: Sharded}, nodes: 2, parallelism: {data: 2}}",
            "spec.rollout.nodes=2",
            "spec.output.uri=pvc://runs/a",
        ],
        [
            "spec.trainer={checkpoint: {state: Sharded}, nodes: 2, parallelism: {data: 2}}",
            "spec.rollout.nodes=2",
            "spec.output.uri=file:///shared/runs",
        ],
        ["spec.method.trace.driftBand=0.5"],
        ["spec.output={uri: 's3://runs', secretName: s3, endpointUrl: 'http://minio:9000'}"],
        ["spec.output={uri: 's3://runs/of/us..them/'}"],
        ["spec.output={uri: 'pvc://my-claim.1'}"],
    ],
    ids=str,
)
def test_what_the_resource_allows(manifest: dict[str, Any], overrides: list[str]) -> None:
    """Nothing but what this version does not run yet is said about these."""
    now = {path for rule in SUPPORT_RULES for path in rule.fields}
    faults = check(apply_overrides(manifest, overrides))
    assert [fault for fault in faults if "this version" not in fault.problem or fault.path not in now] == []


def test_all_faults_come_at_once(manifest: dict[str, Any]) -> None:
    """Mistakes of spelling, type and rule together, and no rule speaks about a value that did not parse."""
    spec = manifest["spec"]
    spec["algorithm"] = {"steps": "3", "promptsPerStep": 5, "samplesPerPromt": 8, "miniBatches": 3}
    spec["learningRate"] = 0.1
    spec["quantization"] = {"targets": ["KV"], "secondInput": "Recorded"}
    spec["method"] = {"name": "TRACE", "trace": {"layers": {"policy": "Last"}}}
    spec["transport"] = {"onlyObjct": True}
    found = by_path(check(manifest))
    assert set(found) == {
        "spec.algorithm.steps",
        "spec.algorithm.samplesPerPrompt",
        "spec.algorithm.samplesPerPromt",
        "spec.learningRate",
        "spec.quantization.targets[0]",
        "spec.method.trace.layers.last",
        "spec.transport.onlyObjct",
    }
    assert "did you mean samplesPerPrompt?" in found["spec.algorithm.samplesPerPromt"]
    assert "spec.trainer.optimizer.learningRate" in found["spec.learningRate"]


def test_items_of_a_list_that_is_too_long_are_looked_at_too(manifest: dict[str, Any]) -> None:
    manifest["spec"]["quantization"] = {"targets": ["RoutedExpert", "KVCache", "KVCache"]}
    assert [(fault.path, fault.remedy) for fault in check(manifest)] == [
        ("spec.quantization.targets", "write at most 2"),
        ("spec.quantization.targets[0]", "write RoutedExperts"),
    ]


@pytest.mark.parametrize(
    ("section", "path", "meant"),
    [
        ({"rollout": {"replicas": 2}}, "spec.rollout.replicas", "spec.rollout.nodes"),
        (
            {"method": {"name": "TRACE", "trace": {"layers": {"policy": "List", "list": [1]}}}},
            "spec.method.trace.layers.list",
            "spec.method.trace.layers.indices",
        ),
    ],
)
def test_names_from_elsewhere(
    manifest: dict[str, Any], section: dict[str, Any], path: str, meant: str
) -> None:
    manifest["spec"].update(section)
    (fault,) = check(manifest)
    assert (fault.path, fault.problem) == (path, "is not a field")
    assert fault.remedy.endswith(f"write {meant}")


def test_names_in_snake_case_are_refused_with_their_name(manifest: dict[str, Any]) -> None:
    manifest["spec"]["rollout"] = {"gpus_per_node": 0}
    assert "did you mean gpusPerNode?" in by_path(check(manifest))["spec.rollout.gpus_per_node"]


@pytest.mark.parametrize("key", ["apiVersion", "kind", "metadata", "spec"])
def test_missing_top_level_key(manifest: dict[str, Any], key: str) -> None:
    del manifest[key]
    faults = check(manifest)
    assert [fault.path for fault in faults] == [key]
    assert f"add {key}" in faults[0].remedy


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (10**30, "is beyond 64 bits"),
        (float("inf"), "is inf"),
        (float("nan"), "is nan"),
        (b"x", "is a bytes"),
        ({1}, "is a set"),
        ("\ud800", "surrogate"),
        ({1: 2}, "has the key 1, not text"),
        ({"\ud800": 2}, "has a key that holds half of a surrogate pair"),
    ],
)
def test_values_that_json_has_not(manifest: dict[str, Any], value: object, problem: str) -> None:
    manifest["spec"]["task"]["parameters"] = {"a": [value]}
    (fault,) = check(manifest)
    assert fault.path == "spec.task.parameters.a[0]"
    assert problem in fault.problem


def test_documents_without_bound(manifest: dict[str, Any]) -> None:
    """YAML aliases make cycles and bombs out of a few lines."""
    cycle: list[object] = []
    cycle.append(cycle)
    bomb: object = "x"
    for _ in range(30):
        bomb = [bomb, bomb]
    for value in (cycle, bomb):
        manifest["spec"]["task"]["parameters"] = {"a": value}
        assert len(check(manifest)) == 1


@pytest.mark.parametrize("document", [None, [], "job", 3, {}])
def test_documents_that_are_no_job(document: object) -> None:
    assert check(document)


def test_status_is_not_read(manifest: dict[str, Any]) -> None:
    manifest["status"] = {"unknown": 1}
    assert check(manifest) == []


def test_model_directory(manifest: dict[str, Any], tmp_path: Path) -> None:
    """Rules read the model's own config.json: 32 divides neither 48 nor 16, 16 does not divide 24."""
    config = BUILTIN_MODELS["tiny-moe"].to_hf_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    manifest["spec"]["model"]["uri"] = f"file://{tmp_path}"
    assert check(manifest) == []

    manifest["spec"]["quantization"] = {"format": "MXFP4"}
    divided = [fault.problem for fault in check(manifest) if "does not divide" in fault.problem]
    assert [problem.split("model's ")[1] for problem in divided] == [
        "expert hidden size 48",
        "head dimension 16",
    ]

    manifest["spec"]["quantization"] = {"targets": ["RoutedExperts"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 24}))
    assert (
        "does not divide the model's expert hidden size 24"
        in by_path(check(manifest))["spec.quantization.format"]
    )
    manifest["spec"]["method"] = {"name": "BF16"}
    assert check(manifest) == []

    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0]}))
    assert "1 dense layers" in by_path(check(manifest))["spec.model.uri"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "\x00\xff", "[" * 100_000, '{"model_type": "llama"}', '{"model_type": "qwen3_moe"}'],
)
def test_model_directory_with_a_wrong_config(manifest: dict[str, Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    manifest["spec"]["model"]["uri"] = f"file://{tmp_path}"
    (fault,) = check(manifest)
    assert fault.path == "spec.model.uri"
    assert fault.problem
    assert fault.remedy


def test_load_job_lists_all_faults(manifest: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(manifest))
    assert load_job(path, ["spec.algorithm.steps=7"]).spec.algorithm.steps == 7
    with pytest.raises(InputError) as error:
        load_job(path, ["spec.algorithm.steps=0", "spec.algorithm.samplesPerPrompt=1"])
    assert str(error.value).startswith(
        f"{path} is not a job that can run, 2 faults:\n  spec.algorithm.steps: is 0;"
    )
    assert len(error.value.faults) == 2


@pytest.mark.parametrize(
    "uri", ["s3://AK:SECRET@bucket", "S3://AK:SECRET@b", " https://SECRET@b", "gs://a:SECRET@b"]
)
@pytest.mark.parametrize("field", ["output", "transport.object", "model", "task", "task.source"])
def test_credentials_of_a_url_are_not_printed(manifest: dict[str, Any], field: str, uri: str) -> None:
    faults = check(apply_overrides(manifest, [f"spec.{field}.uri='{uri}'"]))
    assert any("holds credentials" in fault.problem for fault in faults)
    assert "SECRET" not in str([str(fault) for fault in faults])


def test_a_container_in_a_url_is_no_credential(manifest: dict[str, Any]) -> None:
    assert (
        check(apply_overrides(manifest, ["spec.transport.object.uri=abfs://records@account.example/a"])) == []
    )
