"""ONNX: one graph of the forward pass for all lengths, including padding."""

from functools import partial

import pytest
import torch

from tests.errors import assert_as_good
from tests.models.conftest import ANY_LENGTH, Logits, make_model, padded
from tests.models.hybrids import make_kind

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.hf


@torch.no_grad()
@pytest.mark.parametrize("make", [make_model, partial(make_kind, "all")], ids=["frac", "all"])
def test_a_graph_of_any_length(tmp_path, make):
    model = Logits(make(dtype=torch.float32))
    program = torch.onnx.export(model, padded(40), dynamo=True, dynamic_shapes=ANY_LENGTH)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    lengths = (7, 40, 600)
    usual = [model(*padded(time)) for time in lengths]
    model.double()
    for time, logits in zip(lengths, usual, strict=True):
        ids, mask = padded(time)
        (got,) = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
        results = (torch.from_numpy(got), logits, model(ids, mask))
        # What padding gives depends on what attention makes of nothing.
        assert_as_good(*(x[mask == 1] for x in results), f"{time} tokens")
