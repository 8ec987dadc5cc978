"""Progress reports, sent to a real TLS server in the API server's place."""

import json
import logging
import ssl
import subprocess
import threading
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from live_processes import wait_until

from tracerl.api.job import Progress
from tracerl.api.pods import PROGRESS_KEY
from tracerl.rl.steprecord import Expectation, FinishRecord
from tracerl.runtime.progress import (
    ApiServer,
    ProgressReporter,
    _decimal,
    judged,
)


class ApiServerStandIn:
    """Takes PATCHes; `status` is what it answers."""

    def __init__(self, account):
        self.requests, self.status = [], 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PATCH(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, dict(self.headers), json.loads(body)))
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(account / "ca.crt", account / "key.pem")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.address = ApiServer("127.0.0.1", self.server.server_port, account)

    def steps(self):
        return [json.loads(body["data"][PROGRESS_KEY])["step"] for _, _, body in self.requests]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    """What the kubelet mounts, with a CA that is its own server's certificate."""
    directory = tmp_path_factory.mktemp("serviceaccount")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    names_of = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "ca.crt")]
    subprocess.run([*command, *names_of, *files], check=True, capture_output=True)
    (directory / "namespace").write_text("team-a")
    (directory / "token").write_text("first\n")
    return directory


@pytest.fixture
def server(account):
    stand_in = ApiServerStandIn(account)
    yield stand_in
    stand_in.close()


def test_a_report_is_a_merge_patch_of_the_job_s_config_map(server, account):
    progress = Progress(step=3, steps=9, policy_version=3, reward=Decimal("0.25"))
    with ProgressReporter(server.address, "canary-progress", interval_seconds=0) as reporter:
        reporter.report(progress)
        wait_until(lambda: server.requests, "the first report")
        (account / "token").write_text("second\n")
        reporter.report(Progress(step=4, steps=9))
    (path, headers, body), (_, later, last) = server.requests
    assert path.partition("?")[0] == "/api/v1/namespaces/team-a/configmaps/canary-progress"
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert (headers["Authorization"], later["Authorization"]) == ("Bearer first", "Bearer second")
    assert list(body) == ["data"]
    assert list(body["data"]) == ["progress"]
    assert Progress.model_validate_json(body["data"]["progress"], strict=True) == progress
    assert json.loads(body["data"]["progress"])["policyVersion"] == 3
    assert json.loads(last["data"]["progress"])["step"] == 4


def test_the_latest_one_wins_and_the_last_one_is_never_lost(server):
    """An hour between reports: only the first is sent, until closing sends the last."""
    with ProgressReporter(server.address, "p", interval_seconds=3600) as reporter:
        reporter.report(Progress(step=1))
        wait_until(lambda: server.requests, "the first report")
        for step in range(2, 7):
            reporter.report(Progress(step=step))
    assert server.steps() == [1, 6]


def test_a_failure_is_said_once_and_made_up_for(server, caplog):
    server.status = 403
    with caplog.at_level(logging.INFO), ProgressReporter(server.address, "p", interval_seconds=0) as reporter:
        reporter.report(Progress(step=1))
        wait_until(lambda: len(server.requests) >= 3, "it is tried again")
        server.status = 200
        wait_until(lambda: "reported again" in caplog.text, "it got through")
    assert set(server.steps()) == {1}
    assert [record.message for record in caplog.records] == [
        "progress cannot be reported to config map p: the API server answers 403 Forbidden",
        "progress is reported again",
    ]


def test_without_a_server_nothing_is_held_up(server, account, caplog):
    address = ApiServer("127.0.0.1", server.server.server_port, account)
    server.server.server_close()
    with ProgressReporter(address, "p") as reporter:
        reporter.report(Progress(step=1))
    with ProgressReporter(ApiServer("no-such-host.invalid", 443, account / "nothing"), "p") as reporter:
        reporter.report(Progress(step=1))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}, ("10.96.0.1", 443)),
        ({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}, ("fd00::1", 6443)),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, None),
        ({}, None),
    ],
)
def test_where_the_api_server_is(environment, found):
    server = ApiServer.of_pod(environment)
    assert (server and (server.host, server.port)) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (123456.0, "123500"),
        (1.5e-6, "0.0000015"),
        (1.5e-7, "0"),
        (1e-30, "0"),
        (0.0, "0"),
        (-2.0, "-2"),
        (float("nan"), None),
        (float("inf"), None),
        (None, None),
    ],
)
def test_numbers_have_four_digits_and_no_exponent(value, text):
    found = _decimal(value)
    assert (None if found is None else str(found)) == text
    again = Progress.model_validate_json(Progress(reward=found).model_dump_json(), strict=True)
    assert again.reward == found


def test_the_end_says_what_became_of_each_expectation():
    found = (
        Expectation(name="maxGapRatio", wanted="<= 0.5", value=0.331449, met=True),
        Expectation(name="minReward", wanted=">= 0.9", value=None, met=False),
    )
    rest = dict.fromkeys(set(FinishRecord.model_fields) - {"type", "expectations"})
    finish = FinishRecord.model_construct(**rest, expectations=found)
    said = judged(Progress(step=60, steps=60, policy_version=60), finish)
    assert said.step == 60
    # As the operator reads it: a decimal is text.
    assert json.loads(said.model_dump_json(by_alias=True))["expectations"] == [
        {"name": "maxGapRatio", "wanted": "<= 0.5", "value": "0.3314", "met": True},
        {"name": "minReward", "wanted": ">= 0.9", "value": None, "met": False},
    ]
