import pytest
import torch

from flash_frac.ops.triton.launch import INTERPRETED


@pytest.fixture(scope="session")
def device():
    """Where kernels can run: in the interpreter on the CPU, or on a GPU."""
    if INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip(
        "kernels need TRITON_INTERPRET=1 or a CUDA device (make test runs them interpreted)"
    )


def dtypes():
    """The interpreter computes float32 only."""
    if torch.cuda.is_available() and not INTERPRETED:
        return [torch.float32, torch.bfloat16, torch.float16]
    return [torch.float32]
