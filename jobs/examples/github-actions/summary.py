"""`summary.py JUNIT.xml`: the cases as a Markdown table, for the page of a GitHub Actions run."""

import sys
from pathlib import Path
from xml.etree import ElementTree

path = Path(sys.argv[1])
if not path.exists():
    sys.exit(f"{path} is not there: the canary did not start; see the log of the step before")
sys.stdout.write("| case | outcome | figure |\n| --- | --- | --- |\n")
for case in ElementTree.parse(path).getroot().iter("testcase"):  # noqa: S314  written by the step before
    problem = case.find("failure")
    skipped = case.find("skipped")
    outcome = "failed" if problem is not None else "skipped" if skipped is not None else "passed"
    found = problem if problem is not None else skipped
    said = found.get("message") if found is not None else case.findtext("system-out")
    text = (said or "").replace("|", "\\|").replace("\n", " ")
    sys.stdout.write(f"| {case.get('name')} | {outcome} | {text} |\n")
