"""What several test modules here share."""

import cloudpickle
import pytest

from labkit.parallel.core import build
from tests.parallel.versions import COMPILED, MIXED


@pytest.fixture(scope="module")
def workers_travel_by_value(request):
    """Functions of the test module reach the ranks whole, so that these need not import it, and pytest with it."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(autouse=True)
def core_is_built_where_it_is_wanted(request):
    """Tests with a `version` that takes the compiled core are skipped where there is none."""
    version = getattr(request.node, "callspec", None) and request.node.callspec.params.get("version")
    if version in (COMPILED, MIXED):
        try:
            build.load(build.BUILD_S)
        except build.CoreUnavailable as error:
            pytest.skip(str(error))
