"""The command line as a user meets it: exit codes, one sentence on stderr, and never a traceback."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tracerl import cli
from tracerl.observe.runlog import RunLog
from tracerl.rl.steprecord import StartRecord

JOB = """
apiVersion: tracerl.dev/v1alpha1
kind: TraceRLJob
metadata: {name: tiny}
spec:
  model: {uri: "builtin://tiny-moe"}
  task: {name: builtin/chain_sum}
  algorithm: {steps: 2, promptsPerStep: 2, samplesPerPrompt: 2}
  method: {name: TRACE}
  transport: {onlyObject: true}
"""


@pytest.fixture
def here(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "broken.yaml").write_text(JOB.replace("steps: 2", "steps: 0").replace("TRACE", "Trace"))
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    return tmp_path


def tracerl(where, *arguments, **more):
    environment = {**os.environ, "TRACERL_CACHE": str(where / "cache"), "COLUMNS": "100"}
    command = [sys.executable, "-m", "tracerl", *arguments]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=60, check=False, **more
    )


BAD_INPUT: list[tuple[list[str], str]] = [
    ([], "COMMAND"),
    (["frobnicate"], "there is no command 'frobnicate'"),
    (["records"], "COMMAND"),
    (["run"], "JOB.yaml"),
    (["run", "job.yaml", "--resum"], "unrecognized arguments: --resum"),
    (["run", "job.yaml", "--out"], "--out: expected one argument"),
    (["run", "nowhere.yaml"], "nowhere.yaml does not exist"),
    (["run", "taken"], "taken is a directory"),
    (["run", "empty.yaml"], "empty.yaml is empty"),
    (["run", "binary.yaml"], "binary.yaml is not UTF-8 text"),
    (["run", "job.yaml", "--set", "spec.algorithm.stepz=1"], "did you mean spec.algorithm.steps?"),
    (["run", "job.yaml", "--set", "spec.algorithm.steps"], "has no ="),
    (["run", "job.yaml", "--out", "taken"], "taken holds other files, for example notes.txt"),
    (["run", "job.yaml", "--out", "job.yaml"], "job.yaml cannot be used as run directory (file exists)"),
    (["run", "job.yaml", "--out", "job.yaml/x"], "cannot be used as run directory (not a directory)"),
    (["run", "job.yaml", "--out", "x" * 256], "cannot be used as run directory (file name too long)"),
    (["run", "job.yaml", "--out", "x" * 256, "--resume"], "directory (file name too long)"),
    (["run", "job.yaml", "--out", "new", "--resume"], "new has no run to resume"),
    (["run", "job.yaml", "--set", "spec.output.uri=s3://runs"], "give a directory with --out"),
    (["validate", "nowhere.yaml"], "nowhere.yaml does not exist"),
    (["validate", "job.yaml", "--format", "xml"], "invalid choice: 'xml'"),
    (["compare", "job.yaml"], "--methods"),
    (["compare", "job.yaml", "--methods", "TRACE,PPO"], "'PPO' is not a method; choose from BF16"),
    (["compare", "job.yaml", "--methods", "QAT,qat"], "QAT is named twice"),
    (["compare", "job.yaml", "--methods", "QAT", "--seeds", "0"], "'0' is not a number of seeds"),
    (["records", "verify", "nowhere"], "nowhere does not exist"),
    (["records", "inspect", "taken"], "holds no record frames"),
    (["report", "taken"], "is not a run directory"),
    (["report", "nowhere"], "is not a run directory"),
    (["run", "job.yaml", "--junit", "nowhere/junit.xml"], "--junit nowhere/junit.xml cannot be written"),
    (["canary", "job.yaml", "--junit", "taken"], "--junit taken cannot be written; give a file"),
    (["canary", "job.yaml", "--junit", "/dev/null"], "--junit /dev/null cannot be written; give a file"),
    (["canary", "job.yaml", "--junit", "x" * 300], "cannot be written; give a file"),
    (["run", "job.yaml", "--junit", "job.yaml/junit.xml"], "--junit job.yaml/junit.xml cannot be written"),
    (["canary", "nowhere.yaml"], "nowhere.yaml does not exist"),
    (["canary", "job.yaml", "--timeout", "15"], "'15' is not a time such as 90s, 15m or 2h"),
]


def _one_sentence(stdout, stderr, words):
    assert words in stderr
    assert stderr.startswith("tracerl: ")
    assert stderr.count("\n") == 1
    assert stdout == ""


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2(here, monkeypatch, capsys, arguments, words):
    before = {path.name for path in here.rglob("*")}
    monkeypatch.chdir(here)
    try:
        code = cli.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    _one_sentence(*capsys.readouterr(), words)
    assert {path.name for path in here.rglob("*")} == before


@pytest.mark.parametrize(("arguments", "words"), BAD_INPUT[1:15:4])
def test_bad_input_of_a_real_command(here, arguments, words):
    done = tracerl(here, *arguments)
    assert done.returncode == 2
    _one_sentence(done.stdout, done.stderr, words)


@pytest.mark.parametrize("command", ["run", "validate"])
def test_all_faults_of_a_manifest_at_once(here, command):
    done = tracerl(here, command, "broken.yaml")
    assert done.returncode == 2
    assert "2 faults" in done.stderr
    assert "spec.algorithm.steps" in done.stderr
    assert "spec.method.name" in done.stderr


def test_validate_says_yes(here):
    done = tracerl(here, "validate", "job.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "job.yaml is valid: job tiny, method TRACE\n"


ELSEWHERE = [
    ("spec.placement.fabric=ComputeDomain", "is ComputeDomain, which only a cluster has; write Auto"),
    ("spec.placement.topology={required: rack}", "topology.required: is there on a cluster only; remove it"),
    ("spec.placement.topology={preferred: rack}", "topology.preferred: is there on a cluster only"),
    ("spec.placement.queue=team", "spec.placement.queue: is there on a cluster only; remove it"),
    ("spec.output.uri=pvc://claim/runs", "not on this machine; give a directory with --out"),
]


@pytest.mark.parametrize(("override", "words"), ELSEWHERE)
def test_validate_says_what_does_not_run_on_this_machine(here, capsys, override, words):
    arguments = ["validate", str(here / "job.yaml"), "--set", override]
    assert cli.main(arguments) == 0
    valid, head, fault = capsys.readouterr().out.splitlines()
    assert valid.endswith(" is valid: job tiny, method TRACE")
    assert head == "tracerl run on this machine would refuse it:"
    assert words in fault
    assert cli.main([*arguments, "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["notHere"]
    assert found["path"] == fault.split(":")[0].strip()
    if not override.startswith("spec.output"):  # --out wins over that
        assert cli.main(["run", *arguments[1:], "--out", str(here / "out")]) == 2
        assert words in capsys.readouterr().err


def test_a_table_in_a_file_has_no_trailing_blanks(here, capsys):
    with RunLog(here / "run") as log:
        start = {"run_id": "r", "time": 1.0, "resumed_from": 0, "steps": 2, "method": "TRACE"}
        start |= {"parameters": 1, "row_bytes": 58, "whole_row_bytes": 360, "held_out_reward": 0.5}
        start |= {"warmup_steps": 0, "warmup_seconds": 0.0}
        log.write(StartRecord(**start).model_dump(mode="json"))
    assert cli.main(["report", str(here / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("file", "code", "paths"), [("job.yaml", 0, []), ("broken.yaml", 2, ["spec.al", "spec.me"])]
)
def test_validate_as_json(here, file, code, paths):
    done = tracerl(here, "validate", file, "--format", "json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["valid"]) == (code, "", code == 0)
    assert sorted(fault["path"][:7] for fault in found["faults"]) == paths
    assert all(fault["problem"] and fault["remedy"] for fault in found["faults"])


def test_inspected_frames_have_totals(capsys):
    golden = Path(__file__).parent / "records/golden"
    assert cli.main(["records", "inspect", f"{golden}/frame-v1.trec", f"{golden}/prefix-v1.trec"]) == 0
    *frames, totals = capsys.readouterr().out.splitlines()
    assert len(frames) == 2
    size = sum((golden / name).stat().st_size for name in ("frame-v1.trec", "prefix-v1.trec"))
    assert re.fullmatch(rf"2 frames: \d rows, {size} bytes", totals)


def test_the_version(here):
    done = tracerl(here, "--version")
    assert (done.returncode, done.stdout) == (0, "tracerl 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"torch", "pydantic", "rich", "numpy"}),
        (["validate", "job.yaml"], {"torch", "rich", "numpy"}),
        # What the operator's image does not have. Without a cluster it ends when all is imported.
        (["canary", "job.yaml"], {"torch", "rich", "numpy", "jinja2", "aiohttp"}),
    ],
)
def test_it_starts_without_what_it_does_not_need(here, arguments, absent):
    code = (
        "import sys\n"
        "from tracerl import cli\n"
        "try:\n"
        f"    cli.main({arguments})\n"
        "finally:\n"
        "    print([*sys.modules])"
    )
    environment = {**os.environ, "KUBECONFIG": str(here / "absent")}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=True)
    assert not absent & set(eval(done.stdout.splitlines()[-1]))


def test_ctrl_c_is_a_sentence_from_the_first_import_on(here):
    """The first import of the command line is where it is sent; nothing of ours runs before."""
    code = (
        "import os, signal, sys\n"
        "from tracerl.__main__ import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == {!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.argv[1:] = ['validate', 'job.yaml']\n"
        "sys.exit(main())"
    )
    for module in ("tracerl.cli", "tracerl.api.errors", "pydantic_core", "yaml"):
        command = [sys.executable, "-c", code.format(module)]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "tracerl: stopped (Ctrl-C)\n"), module


def test_a_run_directory_that_may_not_be_examined(here):
    (here / "taken").chmod(0)
    if os.access(here / "taken", os.X_OK):
        pytest.skip("root may examine every directory")
    done = tracerl(here, "run", "job.yaml", "--out", "taken/run")
    (here / "taken").chmod(0o700)
    assert done.returncode == 2
    _one_sentence(done.stdout, done.stderr, "cannot be used as run directory (permission denied)")


def test_an_unexpected_error_is_a_sentence_and_its_traceback_a_file(here):
    """A cache directory that cannot be one: the place for the traceback is then the temporary directory."""
    code = (
        "import sys\n"
        "from tracerl import cli\n"
        "sys.modules['tracerl.runtime.doctor'] = None\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    environment = {**os.environ, "TRACERL_CACHE": str(here / "job.yaml"), "TMPDIR": str(here)}
    command = [sys.executable, "-c", code, "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("tracerl: this should not have happened (ModuleNotFoundError")
    assert done.stderr.count("\n") == 1
    log = Path(done.stderr.split()[-1])
    assert log.parent == here
    assert "Traceback" in log.read_text()
    shown = subprocess.run(
        [*command, "--debug"], env=environment, capture_output=True, text=True, check=False
    )
    assert "Traceback" in shown.stderr


def test_a_reader_that_goes_away_is_no_error(here):
    process = subprocess.Popen(
        [sys.executable, "-m", "tracerl", "validate", "job.yaml"],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1


@pytest.mark.parametrize("limit", [0, 200])
def test_a_full_disk_is_one_sentence(here, monkeypatch, limit):
    """A bound on the size of files makes the writes fail that a full disk would, without a disk to fill."""
    # Python does not notice when a module's bytecode is cut off there, and nobody could import it afterwards.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    done = tracerl(
        here,
        *["run", "job.yaml", "--out", "run"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "cannot be written (file too large); make room or give another directory" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in (here / "run").iterdir()) == ["lock"]


def test_doctor_says_what_is_there_and_how_to_get_what_is_not(here):
    (here / "cache").write_text("a file where the cache should be")
    done = tracerl(here, "doctor", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("missing  open files: 200 allowed; raise the hard limit") for line in lines)
    remedy = "name a directory with room in TRACERL_CACHE"
    assert f"missing  cache: {here}/cache: file exists; {remedy}" in lines
    assert {line.split()[0] for line in lines} <= {"ok", "missing", "absent"}
    assert all("; " in line for line in lines if not line.startswith("ok"))
    for name in ("Python", "system", "packages", "torch", "CPU", "memory", "shared memory", "GPU"):
        assert any(f" {name}: " in line for line in lines), name


PLACES = ("ring", "spill directory", "object store")


def doctor(here, capsys, *overrides):
    """Exit code, and what is said of the places where records go."""
    more = [word for override in overrides for word in ("--set", override)]
    code = cli.main(["doctor", str(here / "job.yaml"), *more])
    found = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, said = line[9:].partition(": ")
        if name in PLACES:
            found[name] = (line.split()[0], said)
    return code, found


def test_doctor_tries_the_places_where_the_records_of_a_job_go(here, capsys):
    (here / "nvme").mkdir()
    spill = [f"spec.transport.spillPath={here}/nvme", "spec.transport.spill=ObjectStore"]
    places = [
        "spec.transport={ring: {size: 1Mi}}",
        *spill,
        f"spec.transport.object.uri=file://{here}/objects",
    ]
    code, found = doctor(here, capsys, *places)
    assert {name: state for name, (state, _) in found.items()} == dict.fromkeys(PLACES, "ok"), found
    assert code == 0
    assert re.fullmatch(r"1 MiB of [\d.]+ [MG]iB free in /dev/shm", found["ring"][1])
    assert found["object store"][1] == f"file://{here}/objects takes, gives back, lists and deletes objects"
    assert [*(here / "nvme").iterdir(), *(here / "objects").iterdir()] == []

    bad = ["spec.transport={ring: {size: 1Pi}}", f"spec.transport.spillPath={here}/nowhere", *spill[1:]]
    code, found = doctor(here, capsys, *bad, f"spec.transport.object.uri=file://{here}/job.yaml/objects")
    assert code == 1
    assert {name: state for name, (state, _) in found.items()} == dict.fromkeys(PLACES, "missing")
    assert re.search(r"free in /dev/shm; lower spec\.transport\.ring\.size, or .*\(1048576\.0 GiB\)$",
                     found["ring"][1])  # fmt: skip
    assert found["spill directory"][1].startswith(f"{here}/nowhere: no such file or directory; name a dir")
    assert f"file://{here}/job.yaml/objects: not a directory; " in found["object store"][1]

    assert list(doctor(here, capsys)[1]) == []  # onlyObject, below the run directory: nothing to try
    assert cli.main(["doctor", str(here / "broken.yaml")]) == 2
    said = capsys.readouterr()
    assert "missing  job: not valid, so ring, spill directory and object store" in said.out
    assert " torch: " in said.out
    assert "spec.algorithm.steps" in said.err
    assert cli.main(["doctor", "--set", "spec.transport.ring.size=1Mi"]) == 2
    assert "--set changes a manifest, and none is given" in capsys.readouterr().err


def test_a_plan(here, capsys):
    arguments = ["plan", str(here / "job.yaml"), "--model", "builtin://tiny-moe", "--step-seconds", "2"]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny: TRACE, ")
    assert cli.main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert f"{document['token']['record']} B" in text
    for option in (["--tokens-per-second", "-1"], ["--prompt-tokens", "0"], ["--bandwidth", "inf"]):
        with pytest.raises(SystemExit) as caught:
            cli.main([*arguments, *option])
        assert caught.value.code == 2
        assert "is not " in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["run", "validate", "plan", "compare", "records inspect", "records verify", "report", "doctor"],
)
def test_every_option_is_in_the_reference(capsys, command):
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "--help"])
    assert caught.value.code == 0
    text = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    assert f"tracerl {command}" in text
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert "--debug" in options
    assert not [option for option in options if option not in text]


@pytest.mark.parametrize(
    ("called", "words"),
    [
        ("{here}/.venv/bin/tracerl", [".venv/bin/tracerl"]),
        (".venv/bin/tracerl", [".venv/bin/tracerl"]),
        ("/opt/tracerl/bin/tracerl", ["/opt/tracerl/bin/tracerl"]),
        ("/opt/tracerl/lib/tracerl/__main__.py", [sys.executable, "-m", "tracerl"]),
    ],
)
def test_a_command_that_is_suggested_names_the_program_as_it_was_called(tmp_path, monkeypatch, called, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called.format(here=tmp_path), "run", "job.yaml"])
    assert cli._program() == words
