"""The command line. Each command imports what it needs when it runs: `tracerl validate` needs no torch.

Exit codes: 0 done, 1 the job failed or was stopped, 2 bad input. Errors are one sentence on stderr.
"""

# Commands import when they run (above), and printing is what a command line is for.
# ruff: noqa: PLC0415, T201

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tracerl.api.errors import Fault
    from tracerl.api.job import TraceRLJob
    from tracerl.observe.junit import Outcome
    from tracerl.observe.run import Ending
    from tracerl.runtime.local import Request

DONE, FAILED, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; raises nothing but SystemExit from argparse."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # What parts of the program log is for the logs of a run's processes; a user gets sentences.
    logging.getLogger("tracerl").addHandler(logging.NullHandler())
    try:
        options = _parser().parse_args(given)
        options.given = given
        code = _guarded(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe went away. Python flushes stdout once more at exit and must not meet it then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        _complain("stopped (Ctrl-C)")
        return FAILED
    return code


def _guarded(options: argparse.Namespace) -> int:
    # The errors are imported here because pydantic comes with them, which `--help` does not need.
    from tracerl.api.errors import InputError, TraceRLError

    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except BrokenPipeError:
        raise
    except InputError as error:
        _complain(str(error))
        return BAD_INPUT
    except TraceRLError as error:
        _complain(str(error))
        return FAILED
    except Exception as error:  # whatever it is, the user gets a sentence
        if options.debug:
            raise
        name = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        _complain(f"this should not have happened ({name}); {_keep_traceback()}")
        return FAILED


def _complain(sentence: str) -> None:
    # The terminal that it is for may be gone, after SIGHUP.
    with contextlib.suppress(OSError):
        print(f"tracerl: {sentence}", file=sys.stderr, flush=True)


def _keep_traceback() -> str:
    import tempfile
    import traceback

    from tracerl.runtime.rundir import cache_directory

    for place in (cache_directory() / "logs", Path(tempfile.gettempdir())):
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", prefix="tracerl-", suffix=".log", dir=place, delete=False
            ) as file:
                traceback.print_exc(file=file)
        except OSError:
            continue
        return f"report it with {file.name}"
    return "run it again with --debug to see where"


# -- commands ---------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from tracerl.api.errors import InputError, JobError
    from tracerl.runtime.local import Request, load_local_job, run_directory

    job = load_local_job(options.job, options.set)
    directory = run_directory(job, options.out)
    _require_place(options.junit)
    request = Request(
        job,
        directory,
        options.resume,
        title=f"{job.metadata.name}: {job.spec.method.name} in {_shown(directory)}",
        resume_command=_resume_command(options, directory),
    )
    try:
        with _apart_from_xml(options.junit):
            ending = _train(request, quiet=options.quiet)
    except JobError:
        with contextlib.suppress(InputError):
            _judge_run(directory, options.junit)
        raise
    _judge_run(directory, options.junit)
    return _end(ending)


def _train(request: Request, *, quiet: bool) -> Ending:
    from tracerl.api.errors import JobError, TraceRLError
    from tracerl.runtime.display import display_for
    from tracerl.runtime.local import run_local

    display = display_for(quiet=quiet)
    try:
        ending = run_local(request, display)
    except JobError:
        display.close()
        with contextlib.suppress(TraceRLError):
            _report_run(request.directory, quiet=quiet)
        raise
    finally:
        display.close()
    if ending.state == "Complete":
        _report_run(request.directory, quiet=quiet)
    return ending


def _judge_run(directory: Path, place: Path | None) -> None:
    from tracerl.runtime.results import run_outcome

    if place is not None:
        _write_junit(run_outcome(directory), place)


_STDOUT = Path("-")


def _apart_from_xml(place: Path | None) -> contextlib.redirect_stdout[TextIO]:
    """Send to stderr what is said on stdout, should that be where the XML goes."""
    return contextlib.redirect_stdout(sys.stderr if place == _STDOUT else sys.stdout)


def _require_place(place: Path | None) -> None:
    """Refuse a file that cannot be made, or is none, before anything is run for it."""
    import tempfile

    from tracerl.api.errors import InputError
    from tracerl.api.resolved import require_replaceable

    if place is None or place == _STDOUT:
        return
    try:
        require_replaceable(place)
        # As `write_atomically` makes it, since what may be written is not always what access(2) says.
        tempfile.TemporaryFile(prefix=f".{place.name}.", dir=place.absolute().parent).close()
    except OSError:
        raise InputError(
            f"--junit {place} cannot be written; give a file in a directory that is there, or -"
        ) from None


def _write_junit(outcome: Outcome, place: Path) -> None:
    from tracerl.api.errors import InputError
    from tracerl.api.resolved import write_atomically
    from tracerl.observe.junit import junit_xml

    if place == _STDOUT:
        print(junit_xml(outcome), end="")
        return
    try:
        write_atomically(place, junit_xml(outcome))
    except OSError as error:
        raise InputError(f"--junit {place} cannot be written ({error.strerror}); make room there") from None


def _canary(options: argparse.Namespace) -> int:
    from tracerl.api.load import checked_job
    from tracerl.api.manifest import read_manifest
    from tracerl.api.overrides import apply_overrides
    from tracerl.observe.junit import expectation_line
    from tracerl.runtime.canary import Canary, run_canary

    _require_place(options.junit)
    document = apply_overrides(read_manifest(options.job), options.set)
    canary = Canary(
        document=document,
        job=checked_job(document, options.job),
        namespace=options.namespace,
        timeout_seconds=options.timeout,
    )
    with _apart_from_xml(options.junit):
        outcome = run_canary(canary, say=partial(print, flush=True))
        for one in outcome.expectations:
            print(f"{'met' if one.met else 'broken':8}{expectation_line(one)}", flush=True)
    if options.junit is not None:
        _write_junit(outcome, options.junit)
    if outcome.passed:
        return DONE
    _complain(f"{outcome.reason}: {outcome.message}")
    return FAILED


def _resume_command(options: argparse.Namespace, directory: Path) -> str:
    words = [*_program(), "run", str(options.job)]
    for override in options.set:
        words += ["--set", override]
    return shlex.join([*words, "--out", str(_shown(directory)), "--resume"])


def _program() -> list[str]:
    """How this program was called, by words that work in the same shell and directory."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [sys.executable, "-m", "tracerl"]
    return [str(_shown(called.absolute()))]


def _shown(directory: Path) -> Path:
    here = Path.cwd()
    return directory.relative_to(here) if directory.is_relative_to(here) else directory


def _end(ending: Ending) -> int:
    if ending.state == "Complete":
        return DONE
    _complain(ending.message)
    return FAILED


def _report_run(directory: Path, *, quiet: bool) -> None:
    from tracerl.api.resolved import RunLayout
    from tracerl.observe.summary import summary_table
    from tracerl.runtime.results import write_results

    summary = write_results(directory)
    if summary is not None and not quiet:
        _print_table(summary_table(summary))
        print(f"report: {_shown(RunLayout(directory).report)}")


def _print_table(table: RenderableType) -> None:
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    # A table that is read by a program or from a file must not be cut at 80 columns, nor filled up to them.
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _validate(options: argparse.Namespace) -> int:
    import json

    from tracerl.api.errors import InputError
    from tracerl.api.load import load_job

    try:
        job = load_job(options.job, options.set)
    except InputError as error:
        if options.format == "json":
            said = {"valid": False, "message": str(error), "faults": _documents(error.faults)}
            print(json.dumps(said, indent=2))
            return BAD_INPUT
        raise
    elsewhere = _faults_here(options, job)
    if options.format == "json":
        print(json.dumps({"valid": True, "faults": [], "notHere": _documents(elsewhere)}, indent=2))
    else:
        print(f"{options.job} is valid: job {job.metadata.name}, method {job.spec.method.name}")
        if elsewhere:
            print("tracerl run on this machine would refuse it:")
            print("\n".join(f"  {fault}" for fault in elsewhere))
    return DONE


def _faults_here(options: argparse.Namespace, job: TraceRLJob) -> list[Fault]:
    """What keeps a valid job from running on this machine, as it is and without an --out."""
    from tracerl.api.errors import Fault, InputError
    from tracerl.api.load import load_job
    from tracerl.api.machine import Machine

    faults: list[Fault] = []
    try:
        load_job(options.job, options.set, machine=Machine.here())
    except InputError as error:
        faults += error.faults
    uri = job.spec.output.uri
    if uri is not None and not uri.startswith("file://"):
        faults.append(
            Fault("spec.output.uri", f"is {uri}, not on this machine", "give a directory with --out")
        )
    return faults


def _documents(faults: Sequence[Fault]) -> list[dict[str, str]]:
    return [{"path": fault.path, "problem": fault.problem, "remedy": fault.remedy} for fault in faults]


def _plan(options: argparse.Namespace) -> int:
    import json

    from tracerl.runtime.plan import Load, plan, render

    load = Load(
        prompt_tokens=options.prompt_tokens,
        response_tokens=options.response_tokens,
        tokens_per_second=options.tokens_per_second,
        step_seconds=options.step_seconds,
        bandwidth=options.bandwidth,
    )
    made = plan(options.job, options.set, model=options.model, load=load)
    print(json.dumps(made.to_json(), indent=2) if options.json else render(made))
    return DONE


def _bench_ring(options: argparse.Namespace) -> int:
    import json

    from tracerl.runtime.bench import Settings, bench_ring, render_bench

    settings = Settings.quick() if options.quick else Settings.full()
    peers = None if options.peers is None else [name for name in options.peers.split(",") if name]
    document = bench_ring(settings, peers, say=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(document, indent=2) if options.json else render_bench(document))
    return DONE


def _compare(options: argparse.Namespace) -> int:
    from tracerl.api.resolved import RunLayout
    from tracerl.runtime.compare import parse_methods, plan_arms, run_arms
    from tracerl.runtime.display import display_for
    from tracerl.runtime.local import load_local_job

    methods = parse_methods(options.methods)
    job = load_local_job(options.job, options.set)
    out = (options.out or Path("runs", f"{job.metadata.name}-compare")).expanduser().absolute()
    arms = plan_arms(options.job, options.set, methods, options.seeds, out)
    stopped, failures = run_arms(
        arms, lambda: display_for(quiet=options.quiet), shlex.join([*_program(), *options.given])
    )
    ran = [arm.directory for arm in arms if RunLayout(arm.directory).metrics.exists()]
    for directory in ran:
        _report_run(directory, quiet=True)
    if stopped is not None:
        return _end(stopped)
    if ran:
        _compare_runs(ran, out / "report.html", quiet=options.quiet)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        _complain(f"{failures[0]}{more}")
    return FAILED if failures else DONE


def _compare_runs(directories: Sequence[Path], page: Path, *, quiet: bool) -> None:
    from tracerl.observe.equal import equal_weights_table
    from tracerl.observe.report import write_report
    from tracerl.observe.run import load_run
    from tracerl.observe.summary import comparison_table, summarize, summary_table, variants

    runs = [load_run(directory) for directory in directories]
    write_report(runs, page)
    if not quiet:
        if len(runs) == 1:
            _print_table(summary_table(summarize(runs[0])))
        else:
            made = variants(runs)
            _print_table(comparison_table(made))
            if (equal := equal_weights_table(made)) is not None:
                print()
                _print_table(equal)
        print(f"report: {_shown(page)}")


def _report(options: argparse.Namespace) -> int:
    page = options.out
    if page is None:
        page = options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html")
    _compare_runs(options.runs, page.absolute(), quiet=False)
    return DONE


def _inspect(options: argparse.Namespace) -> int:
    import json

    from tracerl.api.frames import RELEASED
    from tracerl.records.inspect import inspect_frames
    from tracerl.transport.find import find_frames

    frames = rows = size = damaged = released = 0
    for frame in inspect_frames(find_frames(options.places, endpoint_url=options.endpoint_url)):
        if frame.get("reason") == RELEASED:
            released += 1
            continue
        frames, size = frames + 1, size + frame["bytes"]
        if "reason" in frame:
            damaged += 1
        else:
            first, stop = frame["rows"]
            rows += stop - first
        print(json.dumps(frame) if options.format == "json" else _frame_line(frame))
    if options.format == "text":
        more = f"; {damaged:,} damaged" if damaged else ""
        print(f"{frames:,} frames: {rows:,} rows, {size:,} bytes{more}{_released(released)}")
    return FAILED if damaged else DONE


def _released(frames: int) -> str:
    return f"; {frames:,} more were released meanwhile" if frames else ""


def _frame_line(frame: dict[str, Any]) -> str:
    if "reason" in frame:
        return f"{frame['path']}: damaged ({frame['reason']}): {frame['message']}"
    whose = f"trajectory {frame['trajectory']}" if "trajectory" in frame else f"prefix {frame['prefix']}"
    first, stop = frame["rows"]
    return (
        f"{frame['path']}: {whose}, part {frame['part'] + 1} of {frame['parts']}, rows {first}–{stop - 1}, "
        f"version {frame['version']}, {len(frame['sections'])} sections, {frame['bytes']:,} bytes "
        f"({frame['bytesPerRow']:,} a row){', audit' if frame['audit'] else ''}"
    )


def _verify(options: argparse.Namespace) -> int:
    from tracerl.records.inspect import verify_frames
    from tracerl.transport.find import find_frames

    result = verify_frames(find_frames(options.places, endpoint_url=options.endpoint_url))
    for path, reason, message in result.messages:
        print(f"{path}: damaged ({reason}): {message}")
    print(
        f"{result.whole:,} of {result.frames:,} frames are whole: {result.rows:,} rows, "
        f"{result.bytes:,} bytes{_released(result.released)}"
    )
    return DONE if result.whole == result.frames else FAILED


def _doctor(options: argparse.Namespace) -> int:
    from tracerl.api.errors import InputError
    from tracerl.api.load import load_job
    from tracerl.runtime.doctor import Check, examine

    if options.job is None and options.set:
        raise InputError("--set changes a manifest, and none is given; write tracerl doctor JOB.yaml --set …")
    job = wrong = None
    try:
        job = None if options.job is None else load_job(options.job, options.set)
    except InputError as error:
        if not error.faults:  # no manifest at all
            raise
        wrong = error
    missing = False
    for check in examine(job):
        print(check, flush=True)
        missing = missing or (check.needed and not check.ok)
    if wrong is not None:
        found = "not valid, so ring, spill directory and object store of its records were not tried"
        print(Check("job", False, found, "correct the faults below"), flush=True)
        raise wrong
    return FAILED if missing else DONE


# -- options ----------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of printing the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        # argparse repeats all commands here, in other words in each version of Python.
        unknown = re.match(r"argument COMMAND: invalid choice: (.*) \(choose", message)
        if unknown:
            message = f"there is no command {unknown[1]}"
        self.exit(BAD_INPUT, f"tracerl: {message}; see {self.prog} --help\n")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version

        print(f"tracerl {version('tracerl')}")
        parser.exit(DONE)


def _seeds(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seeds from 1 to 1000")
    return int(text)


def _add_set(parser: _Parser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a field, for example spec.algorithm.steps=10; may be repeated",
    )


def _add_junit(parser: _Parser) -> None:
    text = "write how it ended as JUnit XML, a test case for each figure of spec.expect; - is stdout"
    parser.add_argument("--junit", type=Path, metavar="FILE", help=text)


def _duration(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smh])", text, re.ASCII)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 15m or 2h")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _bandwidth(text: str) -> int:
    from tracerl.api.job import quantity_bytes

    try:
        value = quantity_bytes(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not bytes a second, for example 1250M or 5G")
    return value


def _parser() -> _Parser:
    parser = _Parser(
        prog="tracerl",
        description="FP4 reinforcement learning of mixture-of-experts models with TRACE.",
        epilog="Exit codes: 0 done, 1 the job failed or was stopped, 2 bad input.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    common = _Parser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show where an unexpected error came from")
    job = _Parser(add_help=False)
    job.add_argument("job", type=Path, metavar="JOB.yaml", help="manifest of the job")
    _add_set(job)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, *parents: _Parser) -> _Parser:
        made = commands.add_parser(name, help=text, description=text, parents=[*parents, common])
        made.set_defaults(command=command)
        return made

    run = add("run", _run, "Run a job on this machine.", job)
    run.add_argument(
        "--out", type=Path, metavar="DIR", help="run directory; by default spec.output.uri, else runs/NAME"
    )
    run.add_argument("--resume", action="store_true", help="continue the run in that directory")
    run.add_argument("--quiet", action="store_true", help="show errors only")
    _add_junit(run)

    text = "Run a job on a cluster, wait for its end, and fail when it misses what spec.expect asks for."
    canary = add("canary", _canary, text, job)
    text = "by default the manifest's, else the pod's own or that of kubectl's context"
    canary.add_argument("--namespace", "-n", metavar="NAME", help=text)
    text = "how long to wait, for example 90s, 15m or 2h; 1h by default"
    canary.add_argument("--timeout", type=_duration, default=3600, metavar="TIME", help=text)
    _add_junit(canary)

    validate = add("validate", _validate, "Check a manifest and say all that is wrong with it.", job)
    validate.add_argument("--format", choices=["text", "json"], default="text", help="text by default")

    plan = add("plan", _plan, "Work out what a job's records take: bytes a token, ring, bandwidth.", job)
    text = "config.json of the model, or a known model's name; by default spec.model.uri"
    plan.add_argument("--model", metavar="PATH|NAME", help=text)
    text = "mean tokens of a prompt; by default spec.algorithm.maxPromptTokens"
    plan.add_argument("--prompt-tokens", type=_number, metavar="N", help=text)
    text = "mean tokens of a response; by default spec.algorithm.maxResponseTokens"
    plan.add_argument("--response-tokens", type=_number, metavar="N", help=text)
    plan.add_argument(
        "--tokens-per-second", type=_number, metavar="N", help="tokens that all rollouts generate"
    )
    plan.add_argument("--step-seconds", type=_number, metavar="S", help="how long a step takes")
    text = "bytes a second between nodes, for example 5G"
    plan.add_argument("--bandwidth", type=_bandwidth, metavar="N", help=text)
    plan.add_argument("--json", action="store_true", help="print one JSON object")

    compare = add("compare", _compare, "Run a job under several methods and compare them.", job)
    compare.add_argument(
        "--methods", required=True, metavar="A,B,…", help="methods, for example BF16,QAT,TRACE"
    )
    compare.add_argument("--seeds", type=_seeds, default=1, metavar="N", help="runs a method; 1 by default")
    compare.add_argument("--out", type=Path, metavar="DIR", help="by default runs/NAME-compare")
    compare.add_argument("--quiet", action="store_true", help="show errors only")

    text = "Look into stored record frames."
    records = commands.add_parser("records", help=text, description=text)
    verbs = records.add_subparsers(metavar="COMMAND", required=True)

    def add_verb(name: str, command: Callable[[argparse.Namespace], int], text: str) -> _Parser:
        made = verbs.add_parser(name, help=text, description=text, parents=[common])
        text = "frames (*.trec), objects of them (*.trecs), directories, or the directory of a living run"
        made.add_argument("places", nargs="+", metavar="PATH|URL", help=text)
        text = "S3-compatible store of s3:// places; by default AWS_ENDPOINT_URL, else AWS"
        made.add_argument("--endpoint-url", metavar="URL", help=text)
        made.set_defaults(command=command)
        return made

    inspect = add_verb("inspect", _inspect, "Say what record frames hold.")
    inspect.add_argument("--format", choices=["text", "json"], default="text", help="text by default")
    add_verb("verify", _verify, "Check every hash of record frames.")

    text = "Measure a part of TraceRL on this machine."
    bench = commands.add_parser("bench", help=text, description=text)
    parts = bench.add_subparsers(metavar="PART", required=True)
    text = "Measure how fast the ring passes frames between processes, beside peers that are installed."
    ring = parts.add_parser("ring", help=text, description=text, parents=[common])
    ring.set_defaults(command=_bench_ring)
    ring.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    ring.add_argument("--peers", metavar="A,B,…", help="peers to measure; by default all that are installed")
    ring.add_argument("--json", action="store_true", help="print one JSON object")

    report = add("report", _report, "Write report.html of a run, or of several to compare.")
    report.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="run directories")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="the page; by default report.html in DIR, of several here"
    )

    text = "Check this machine, and where a job's records go, and say how to get what is missing."
    doctor = add("doctor", _doctor, text)
    doctor.add_argument("job", type=Path, nargs="?", metavar="JOB.yaml", help="manifest of a job to run here")
    _add_set(doctor)
    return parser
