"""The engine of the fast tests; `real_engine` of the slow ones is in the files that use it."""

import pytest

from tests.server.standin import StandIn


@pytest.fixture
def engine(tmp_path):
    return StandIn(tmp_path / "voices")
