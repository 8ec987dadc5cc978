"""Tasks: equal to reasoning-gym where a twin exists, disjoint splits, and a sentence for everything wrong."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracerl.api.errors import InputError, JobError, TraceRLError
from tracerl.api.job import Task as TaskSpec
from tracerl.rl import taskworker
from tracerl.rl.tasks import ChainSum, Task, load_task

TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
COMPLETIONS = ["{}", "0{}", "{}0", " {}", "{}.0", "1,{}", "{}x", "", "-", "--5", "nan", "1e1", "{}\n", "８"]


def load(tmp_path: Path, **fields: Any) -> Task:
    fields = {"heldOutPrompts": 0, "rewardTimeoutSeconds": 1, **fields}
    return load_task(TaskSpec.model_validate(fields), order_seed=3, scratch=tmp_path)


# -- chain_sum and reasoning-gym --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "seed"),
    [
        ({}, 17),
        (TWO_TERMS, 42),
        ({"min_terms": 1, "max_terms": 3, "min_digits": 1, "max_digits": 1}, 0),
        ({"min_digits": 3, "max_digits": 5, "allow_negation": True}, 2**31 - 1),
    ],
)
def test_the_twin_asks_and_scores_what_reasoning_gym_does(parameters: dict[str, Any], seed: int) -> None:
    real = taskworker._load({"dataset": "chain_sum", "parameters": parameters, "seed": seed})
    twin = ChainSum(parameters, seed)
    for item in twin.items([*range(40), taskworker.CHUNK - 1, taskworker.CHUNK, 2**30 + 5]):
        assert real({"index": item.index}) == {"prompt": item.prompt, "answer": item.answer}
        completions = [pattern.format(item.answer) for pattern in COMPLETIONS]
        rewards = [real({"index": item.index, "completion": text})["reward"] for text in completions]
        assert twin.score([item] * len(completions), completions) == rewards, item


def test_partial_scores_of_reasoning_gym_do_not_count() -> None:
    real = taskworker._load({"dataset": "chain_sum", "parameters": TWO_TERMS, "seed": 1})
    answer = real({"index": 0})["answer"]
    # The package itself gives len(answer) / len(completion) here.
    assert real({"index": 0, "completion": f"{answer} or so"}) == {"reward": 0.0}


def test_chunks_continue_one_data_set() -> None:
    import reasoning_gym

    size = taskworker.CHUNK + 3
    whole = reasoning_gym.create_dataset("basic_arithmetic", seed=5, size=size)
    served = taskworker._load({"dataset": "basic_arithmetic", "parameters": {}, "seed": 5})
    for index in (0, taskworker.CHUNK - 1, taskworker.CHUNK, size - 1):
        assert served({"index": index})["prompt"] == whole[index]["question"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"name": "builtin/chain_sums"}, "spec.task.name builtin/chain_sums is not a task"),
        ({"name": "builtin/chain_sum", "parameters": {"digits": 2}}, "parameters.digits is not a parameter"),
        ({"name": "builtin/chain_sum", "parameters": {"min_terms": 0}}, "parameters.min_terms is 0"),
        (
            {"name": "builtin/chain_sum", "parameters": {"min_terms": "zz"}},
            "task.parameters.min_terms is 'zz'",
        ),
        (
            {"name": "builtin/chain_sum", "parameters": {"max_digits": 5000}},
            "write an integer from 1 to 1000",
        ),
        (
            {"name": "builtin/chain_sum", "parameters": {"min_digits": 100, "max_digits": 1}},
            "spec.task.parameters.min_digits is larger than max_digits",
        ),
        ({"name": "builtin/chain_sum", "parameters": {"allow_negation": "no"}}, "allow_negation is 'no'"),
        ({"name": "builtin/chain_sum", "parameters": {"min_terms": 9}}, "min_terms is larger than max_terms"),
        ({"name": "reasoning_gym/chain_sum", "parameters": {"size": 3}}, "parameters.size is set by the job"),
    ],
)
def test_a_wrong_named_task_is_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load(tmp_path, **fields)


# -- splits and order -------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(0, 60))
def test_held_out_prompts_never_train(seed: int, held_out: int) -> None:
    # One digit, two terms: 200 different prompts, so training draws equal ones all the time.
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    spec = TaskSpec(name="builtin/chain_sum", parameters=parameters, seed=seed, held_out_prompts=held_out)
    task = load_task(spec, order_seed=1, scratch=Path())
    prompts = {item.prompt for item in task.held_out}
    assert len(prompts) == held_out
    for ask in (task.train, task.warmup):
        items = ask(range(150))
        assert not prompts & {item.prompt for item in items}
        # One by one or together, sooner or later: a position has one item.
        assert items[::-1] == [ask([position])[0] for position in reversed(range(150))]


def test_too_many_held_out_prompts(tmp_path: Path) -> None:
    parameters = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(JobError, match=r"only 10 distinct prompts .* fewer than task.heldOutPrompts 11"):
        load(tmp_path, name="builtin/chain_sum", parameters=parameters, heldOutPrompts=11)
    task = load(tmp_path, name="builtin/chain_sum", parameters=parameters, heldOutPrompts=10)
    with pytest.raises(JobError, match="hardly a prompt that is not held out"):
        task.train([0])


def write_lines(tmp_path: Path, lines: list[str]) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


REWARD = """
import os
import sys
import time
print("this must not reach the pipe")
def right(completion, item):
    return float(completion == item["answer"])
def weird(completion, item):
    return {"nan": float("nan"), "text": "1", "none": None, "yes": True}[completion]
def slow(completion, item):
    time.sleep(600)
def wrong(completion, item):
    raise KeyError(completion)
def forks(completion, item):
    if os.fork() == 0:
        if len(completion) % 2:
            raise ValueError("in the child")
        return 0
    return len(completion)
def large(completion, item):
    return eval(completion)
def long(completion, item):
    raise ValueError("\\n\\nfirst \\udce9 ü " + "x" * 500 + "\\nsecond")
def silent(completion, item):
    raise ValueError
def reads(completion, item):
    return len(sys.stdin.read()) + len(os.read(0, 10)) + len(completion)
def answers(completion, item):
    for number in range(3, 30):
        try:
            os.write(number, b"[0, {}]\\n[9, {\\"reward\\": 5}]\\n")
        except OSError:
            pass
    return 1
"""


def jsonl(tmp_path: Path, function: str = "right", count: int = 20, **fields: Any) -> Task:
    (tmp_path / "code.py").write_text(REWARD)
    lines = [json.dumps({"prompt": f"p{n}", "answer": str(n), "extra": [n]}) for n in range(count)]
    return load(
        tmp_path,
        uri=write_lines(tmp_path, ["", *lines, ""]),
        reward=f"my_reward:{function}",
        source={"uri": str(tmp_path / "code.py")},
        **fields,
    )


def test_jsonl_is_split_shuffled_and_scored(tmp_path: Path) -> None:
    task = jsonl(tmp_path, heldOutPrompts=5, answerFormat="Reversed")
    try:
        held_out = {item.prompt for item in task.held_out}
        assert held_out != {f"p{n}" for n in range(5)}
        epochs = [[item.prompt for item in task.train(range(start, start + 15))] for start in (0, 15)]
        assert all(sorted([*epoch, *held_out]) == sorted(f"p{n}" for n in range(20)) for epoch in epochs)
        assert epochs[0] != epochs[1]
        item = next(item for item in task.train(range(15)) if len(str(item.answer)) == 2)
        assert task.supervised_answer(item) == str(item.answer)[::-1]
        completions = [str(item.answer)[::-1], str(item.answer)[::-1] + "0"]
        assert task.score([item, item], completions) == [1.0, 0.0]
    finally:
        task.close()


@pytest.mark.parametrize(
    ("function", "completion", "sentence"),
    [
        ("weird", "nan", "it returned nan, which is not a finite number"),
        ("weird", "text", "it returned '1', which is not a finite number"),
        ("weird", "none", "it returned None"),
        ("large", "1e300", "it returned 1e+300, beyond the limit of 1000000"),
        ("large", "-10**7", "it returned -10000000, beyond the limit of 1000000"),
        ("large", "10**400", "beyond the limit of 1000000"),
        ("large", "'x\\n' * 10**6", "which is not a finite number"),
        ("wrong", "x", "KeyError: 'x'"),
        ("long", "x", "(ValueError: first � ü xxx"),
        ("silent", "x", "(ValueError:"),
        ("answers", "x", "its process mixed up its answers"),
        ("slow", "x", "took longer than 1 s and was stopped"),
    ],
)
def test_a_reward_that_fails_names_its_item(
    tmp_path: Path, function: str, completion: str, sentence: str
) -> None:
    task = jsonl(tmp_path, function)
    try:
        (item,) = task.train([0])
        with pytest.raises(JobError) as error:
            task.score([item], [completion])
        assert sentence in str(error.value)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 400 + len(str(tmp_path))
        assert f"line {item.index} of {tmp_path / 'train.jsonl'}" in str(error.value)
        assert error.value.reason == "RewardFailed"
        assert int(str(item.prompt)[1:]) == item.index - 2  # the file starts with an empty line
    finally:
        task.close()


def test_long_completions_do_not_block_the_pipes(tmp_path: Path) -> None:
    task = jsonl(tmp_path)
    try:
        items = task.train(range(40))
        texts = ["x" * 50_000 if n % 3 else str(item.answer) for n, item in enumerate(items)]
        assert task.score(items, texts) == [float(n % 3 == 0) for n in range(40)]
    finally:
        task.close()


def test_a_process_with_a_thousand_open_files_still_scores(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(Path("/dev/null").open("rb"))
        task = jsonl(tmp_path)
        stack.callback(task.close)
        items = task.train(range(3))
        assert task.score(items, [str(item.answer) for item in items]) == [1.0] * 3


@pytest.mark.parametrize("function", ["forks", "reads"])
def test_rewards_are_not_mixed_up(tmp_path: Path, function: str) -> None:
    task = jsonl(tmp_path, function)
    try:
        for _ in range(2):
            assert task.score(task.train(range(20)), ["x" * n for n in range(20)]) == list(range(20))
    finally:
        task.close()


def test_after_an_error_answers_still_find_their_calls(tmp_path: Path) -> None:
    task = jsonl(tmp_path, "large")
    try:
        for _ in range(6):
            with pytest.raises(JobError, match="NameError"):
                task.score(task.train(range(4)), ["1", "nothing", "2", "3"])
            assert task.score(task.train(range(3)), ["4", "5", "6"]) == [4.0, 5.0, 6.0]
    finally:
        task.close()


def test_a_reward_may_be_a_bool(tmp_path: Path) -> None:
    task = jsonl(tmp_path, "weird")
    try:
        assert task.score(task.train([0]), ["yes"]) == [1.0]
    finally:
        task.close()


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "has no items; write one JSON object a line"),
        (["", "  "], "has no items"),
        (['{"prompt": "a"}', '{"prompt": '], "line 2 of .* is not JSON"),
        (["[" * 100_000], "line 1 of .* is not JSON"),
        (['{"question": "a"}'], 'line 1 of .* has no text "prompt"'),
        (['{"prompt": 3}'], 'line 1 of .* has no text "prompt"'),
        (['{"prompt": ""}'], 'line 1 of .* has no text "prompt"'),
        (['["a"]'], 'line 1 of .* has no text "prompt"'),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path: Path, lines: list[str], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        load(tmp_path, uri=write_lines(tmp_path, lines), reward="a:b")


def test_wrong_places(tmp_path: Path) -> None:
    here = write_lines(tmp_path, ['{"prompt": "a"}'])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"uri": str(tmp_path / "none.jsonl"), "reward": "a:b"}, "cannot be read"),
        ({"uri": "nowhere://x", "reward": "a:b"}, "nowhere://x cannot be read"),
        ({"uri": here, "reward": "no_such_module:b"}, "cannot be loaded .*No module named 'no_such_module'"),
        ({"uri": here, "reward": "json:nothing"}, "cannot be loaded .*AttributeError"),
        (
            {"uri": here, "reward": "a:b", "source": {"uri": str(tmp_path / "x.py")}},
            "source.uri .* cannot be",
        ),
        ({"uri": here, "reward": "a:b", "source": {"configMap": "c"}}, "is not mounted .* on a cluster only"),
        ({"uri": here, "reward": "json:dumps", "heldOutPrompts": 1}, "no training prompt left beside its 1"),
        ({}, "spec.task names nothing to do"),
    ]
    for fields, sentence in cases:
        with pytest.raises(TraceRLError, match=sentence):
            load(tmp_path, **fields)
