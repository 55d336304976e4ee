"""What several test modules here share."""

import cloudpickle
import pytest

from tests.parallel import shared_ranks


@pytest.fixture(scope="session", autouse=True)
def ranks_wait_for_a_debugger(pytestconfig):
    """With `--timeout 0` the deadline of ranks is a day, too."""
    if pytestconfig.getoption("timeout") == 0:
        shared_ranks.TIMEOUT_S = 24 * 3600.0


@pytest.fixture(scope="module", autouse=True)
def workers_travel_by_value(request):
    """Functions of the test module reach the ranks whole, so that these need not import it, and
    pytest with it."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
