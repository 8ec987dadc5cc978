from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from api_server import KUBE, ApiServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that knows TraceRLJobs, by the committed definition."""
    assert KUBE.exists(), f"{KUBE} is not there; run make test-cluster, which builds it"
    path = Path(__file__).parents[2] / "crds/tracerljobs.yaml"
    with ApiServer(tmp_path_factory.mktemp("api-server")) as server:
        server.define(yaml.safe_load(path.read_text()))
        yield server
