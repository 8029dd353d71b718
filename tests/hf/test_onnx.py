"""ONNX: one graph of the forward pass for all lengths, padding included."""

import pytest
import torch

from tests.models.conftest import make_model

pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.hf


class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = make_model(torch.float32, num_hidden_layers=2)

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def inputs(time):
    ids = torch.randint(3, 61, (2, time), generator=torch.Generator().manual_seed(time))
    mask = torch.ones_like(ids)
    mask[0, : time // 3] = 0
    return ids, mask


def test_a_graph_of_any_length(tmp_path):
    model, auto = Logits(), torch.export.Dim.AUTO
    shapes = {"ids": {1: auto}, "mask": {1: auto}}
    program = torch.onnx.export(model, inputs(40), dynamo=True, dynamic_shapes=shapes)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for time in (7, 40, 600):
        ids, mask = inputs(time)
        (logits,) = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
        expected = model(ids, mask).detach()
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)
