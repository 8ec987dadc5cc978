"""What the reader of Dockerfiles takes, what it refuses, and which files of the context it copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from assemble import Assembly, Copy, DockerfileError, Run, context, ignored, parse

GOOD = """\
ARG BASE=debian:bookworm-slim
ARG UNUSED
FROM ${BASE} AS below
ARG COLOUR=red
ENV FIRST=1 \\
    # a comment between
    SECOND="two words"
WORKDIR /src
COPY a b ./
RUN --mount=type=cache,target=/root/.cache/uv echo one \\
    && echo ${COLOUR}

FROM below AS image
COPY --from=below /opt/x /opt/y
LABEL title="${COLOUR} ${FIRST}"
USER 1:2
ENTRYPOINT ["python", "-m", "x"]
CMD []
"""


def test_a_dockerfile_is_read() -> None:
    below, image = parse(GOOD, {"COLOUR": "green"}).values()
    variables = {"COLOUR": "green", "FIRST": "1", "SECOND": "two words"}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert (below.name, below.base, image.base) == ("below", "debian:bookworm-slim", "below")
    assert below.steps == [
        Copy(9, None, ("a", "b"), "/src/"),
        Run(
            line=10,
            command="echo one && echo ${COLOUR}",
            environment={"PATH": path, "HOME": "/root", **variables},
            directory="/src",
            cache="/root/.cache/uv",
        ),
    ]
    assert image.steps == [Copy(14, "below", ("/opt/x",), "/opt/y")]
    assert image.config == {
        "Env": ["FIRST=1", "SECOND=two words"],
        "WorkingDir": "/src",
        "Labels": {"title": "green 1"},
        "User": "1:2",
        "Entrypoint": ["python", "-m", "x"],
        "Cmd": [],
    }


def test_an_argument_of_the_command_line_replaces_the_default() -> None:
    assert parse(GOOD)["below"].base == "debian:bookworm-slim"
    assert parse(GOOD, {"BASE": "debian@sha256:00"})["below"].base == "debian@sha256:00"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN true", "RUN before the first FROM"),
        ("FROM debian", "write FROM image AS name"),
        ("FROM --platform=linux/arm64 debian AS a", "write FROM image AS name"),
        ("FROM ${BASE} AS a", "BASE has no value"),
        ("FROM $BASE AS a", "only ${NAME} is supported"),
        ("FROM d AS a\nFROM d AS a", "line 2: there is a stage a already"),
        ("FROM d AS a\nADD x /", "line 2: ADD is not supported"),
        ("FROM d AS a\nHEALTHCHECK NONE", "HEALTHCHECK is not supported"),
        ("FROM d AS a\nrun true", "run is not supported"),
        ("FROM d AS a\nRUN --network=none true", "RUN --network=none is not supported"),
        ("FROM d AS a\nRUN --mount=type=secret,id=x true", "write --mount=type=cache,target=/path"),
        ('FROM d AS a\nRUN ["true"]', "RUN takes a shell command"),
        (
            "FROM d AS a\nUSER 1\nRUN true",
            "line 3: RUN takes a shell command on one logical line, before USER",
        ),
        ("FROM d AS a\nCOPY x", "COPY takes plain paths"),
        ("FROM d AS a\nCOPY x* /y", "COPY takes plain paths"),
        ("FROM d AS a\nCOPY x y /z", "end the destination with /"),
        ("FROM d AS a\nCOPY --chmod=755 x /y", "COPY --chmod=755 is not supported"),
        ("FROM d AS a\nCOPY --from=b x /y", "there is no stage b above"),
        ("FROM d AS a\nENV A 1", "write ENV name=value"),
        ("FROM d AS a\nENV A=${B}", "B has no value"),
        ("FROM d AS a\nENTRYPOINT python x", "ENTRYPOINT takes a list"),
        ("FROM d AS a\nENTRYPOINT ['python']", "ENTRYPOINT takes a list"),
        ("FROM d AS a\nUSER ${U}", "USER takes one plain word"),
        ("FROM d AS a\nARG A B", "write ARG NAME=value"),
        ("# escape=`\nFROM d AS a", "line 1: another escape character"),
        ("FROM d AS a\nRUN true \\", "ends with a backslash"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    with pytest.raises(DockerfileError) as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("runs/canary/token", True),
        ("README.md", False),
        ("jobs/README.md", True),
        ("jobs/tracerl/cli.py", False),
        ("jobs/tracerl2/cli.py", True),
        ("jobs/tracerl/__pycache__/cli.pyc", True),
        ("__pycache__/x.pyc", True),
        (".env", True),
    ],
)
def test_dockerignore(path: str, out: bool) -> None:
    patterns = ["*", "!README.md", "!jobs/tracerl", "**/__pycache__"]
    assert ignored(path, patterns) is out


def test_files_of_the_context(tmp_path: Path) -> None:
    for name in ("code/b.py", "code/a.py", "code/__pycache__/a.pyc", "secret"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text("# all but code\n*\n!code\n**/__pycache__\n")
    assert context(tmp_path, "code") == [tmp_path / "code/a.py", tmp_path / "code/b.py"]
    with pytest.raises(DockerfileError, match="secret: the context has no such file"):
        context(tmp_path, "secret")


def test_a_stage_is_made_again_when_its_content_changes_and_the_former_one_goes(tmp_path: Path) -> None:
    root, cache = tmp_path / "root", tmp_path / "cache"
    (root / "code").mkdir(parents=True)
    (root / "code/a.py").write_text("one")
    (root / ".dockerignore").write_text("*\n!code\n")
    text = "FROM debian:x AS a\nCOPY code /opt\n"
    text += "FROM a AS image\nCOPY --from=a /opt /opt\nCOPY code /usr/share/code\n"
    base = Assembly(parse(text), root, cache)._path("debian:x")
    (base / "etc").mkdir(parents=True)  # what debootstrap would make

    def image() -> list[dict[str, object]]:
        assembly = Assembly(parse(text), root, cache)
        layers: list[dict[str, object]] = assembly.image("image")["layers"]
        assembly.prune()
        return layers

    first = image()
    below, linked, packed = (Path(str(layer["directory"])) for layer in first)
    assert [layer.get("prefix") for layer in first] == [None, "/opt", "/usr/share/code"]
    assert [layer.get("linked", False) for layer in first] == [False, True, False]
    assert linked == below / "opt"
    assert {path.name for path in below.iterdir()} == {"etc", "opt"}
    assert (linked / "a.py").read_text() == (packed / "a.py").read_text() == "one"
    assert image() == first
    (root / "code/a.py").write_text("two")
    second = image()
    assert second != first
    assert not below.exists()
    assert base.exists()
    assert (Path(str(second[1]["directory"])) / "a.py").read_text() == "two"


def test_a_run_in_an_image_is_refused(tmp_path: Path) -> None:
    assembly = Assembly(parse("FROM debian:x AS a\nFROM a AS image\nRUN true"), tmp_path, tmp_path)
    for name in ("debian:x", "a"):
        assembly._path(name).mkdir(parents=True)
    with pytest.raises(DockerfileError, match="RUN in image"):
        assembly.image("image")
