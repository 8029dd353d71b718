import gc

import pytest
import torch

# Tests run two at a time on two cores; more threads would only wait for each other.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Exempt all loaded modules from garbage collection, which takes 0.3 s over them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def pytest_fixture_setup(fixturedef):
    """Seed fixtures that several tests share: they are set up before `fixed_seed` runs."""
    if fixturedef.scope != "function":
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def gpu_where_one_is_needed(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nobody has written is NaN, so that reading it cannot go unnoticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
