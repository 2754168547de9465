"""The contract holds with the threads that NumPy's BLAS has at a user's, who sets none of the suite's limits."""

import pytest
from threadpoolctl import threadpool_limits

from bitnet_ref.system.threads import available_cpus


@pytest.fixture(autouse=True, scope="module")
def blas_has_its_threads():
    with threadpool_limits(limits=max(2, available_cpus()), user_api="blas"):
        yield
