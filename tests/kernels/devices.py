"""Where kernels can be tested: in the interpreter on the CPU, on a GPU, or nowhere."""

import pytest
import torch

from flash_frac.ops.arithmetic import INTERPRETED

if INTERPRETED:
    DEVICE, DTYPES = "cpu", [torch.float32]  # the interpreter computes nothing else rightly
elif torch.cuda.is_available():
    DEVICE, DTYPES = "cuda", [torch.float32, torch.bfloat16, torch.float16]
else:
    pytest.skip(
        "kernels need TRITON_INTERPRET=1 (`make test` sets it for a run of its own) or a GPU",
        allow_module_level=True,
    )
