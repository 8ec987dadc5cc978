import copy
from typing import Any

import pytest
from manifests import MINIMAL


@pytest.fixture
def manifest() -> dict[str, Any]:
    """The shortest manifest that runs."""
    return copy.deepcopy(MINIMAL)
