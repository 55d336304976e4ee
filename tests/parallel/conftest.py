"""What several test modules here share."""

import cloudpickle
import pytest


@pytest.fixture(scope="module", autouse=True)
def workers_travel_by_value(request):
    """Functions of the test module reach the ranks whole, so that these need not import it, and
    pytest with it."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)
