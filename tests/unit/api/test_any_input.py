"""No manifest makes `check` raise: every mutation gives faults or a job."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracerl.api import schema
from tracerl.api.errors import InputError
from tracerl.api.job import TraceRLJob
from tracerl.api.load import apply_overrides, check, load_job
from tracerl.api.machine import Machine
from tracerl.api.manifest import parse_yaml

ROOT = Path(__file__).parents[3]
CANARY: dict[str, Any] = yaml.safe_load((ROOT / "jobs/examples/canary.yaml").read_text(encoding="utf-8"))

FIELDS = schema.paths()
WORDS = sorted({str(value) for item in schema.walk() for value in schema.allowed(item.schema)})
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [0, -1, 1, 2, 3, 64, 2**31, "1", "0.5", "-1", "1e9", "256Mi", "s3://b/p", "pvc://a", *WORDS]
    )
    | st.binary(max_size=3)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a document."""
    members: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        members = list(value.items())
    elif isinstance(value, list):
        members = list(enumerate(value))
    return [path] + [place for key, member in members for place in places(member, (*path, key))]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """The canary's manifest after a few changes: values replaced, fields removed, renamed or set."""
    document: Any = copy.deepcopy(CANARY)
    for _ in range(draw(st.integers(1, 5))):
        action = draw(st.sampled_from(["replace", "remove", "rename", "set"]))
        if action == "set":
            here = document
            *above, name = draw(st.sampled_from(FIELDS)).replace("[]", "").split(".")
            for key in above:
                if not isinstance(here, dict) or not isinstance(here.setdefault(key, {}), dict):
                    break
                here = here[key]
            else:
                if isinstance(here, dict):
                    here[name] = draw(values)
            continue
        place = draw(st.sampled_from(places(document)))
        if not place:
            if action == "replace" and draw(st.booleans()):
                return draw(values)
            continue
        here = document
        for key in place[:-1]:
            here = here[key]
        if action == "replace":
            here[place[-1]] = draw(values)
        elif action == "remove":
            del here[place[-1]]
        elif isinstance(here, dict):
            here[draw(st.text(max_size=6) | st.sampled_from(FIELDS))] = here.pop(place[-1])
    return document


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mutated(),
    st.sampled_from([None, Machine(gpus=0, shared_memory=None), Machine(gpus=4, shared_memory=2**40)]),
)
def test_check_never_raises(document: Any, machine: Machine | None) -> None:
    faults = check(document, machine=machine)
    for fault in faults:
        assert fault.problem
        assert fault.remedy
        assert "\n" not in str(fault)
    if not faults:
        assert TraceRLJob.model_validate(document).spec.algorithm.steps >= 1


def sentence(call: Callable[[], object]) -> str:
    """What the call has to say; empty where it has nothing to say."""
    try:
        call()
    except InputError as error:
        return str(error)
    return ""


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FIELDS) | st.text("spec.[]019ab", max_size=20),
    st.text(max_size=12) | st.sampled_from(WORDS),
)
def test_overrides_give_a_document_or_a_sentence(path: str, text: str) -> None:
    override = f"{path.replace('[]', '.0')}={text}"
    assert "\n" not in sentence(lambda: check(apply_overrides(CANARY, [override])))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text("{}[]:,-&*!#|>'\"%@`?<~ \n\tab01.=", max_size=60))
def test_yaml_gives_values_or_a_sentence(text: str) -> None:
    assert "\n" not in sentence(lambda: check(parse_yaml(text, "job.yaml")))


def test_the_canary_itself_is_a_job() -> None:
    assert load_job(ROOT / "jobs/examples/canary.yaml").metadata.name == "canary"
