"""Memory of training on a GPU, computed without one, with models whose tensors have no data.

Every operator is the Triton backend's, whose result shapes are known without running it.
"""

import weakref
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flash_frac.layers import body, mlp, plain
from flash_frac.models import FracForCausalLM
from flash_frac.ops import backends


@contextmanager
def tensors_without_data(monkeypatch):
    triton = backends.BACKENDS["triton"]._replace(refusal=lambda x: None)
    monkeypatch.setitem(backends.BACKENDS, "triton", triton)
    # Such tensors have a class of their own.
    for module in (plain, mlp, body):
        monkeypatch.setattr(module, "has_plain_weight", lambda layer: True)
    monkeypatch.setattr(FracForCausalLM, "_fuses_loss", lambda self: True)
    with FakeTensorMode():
        yield


def loss_of(model, batch, length, *, autocast):
    ids = torch.zeros(batch, length, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return model(input_ids=ids, labels=ids, shift_labels=ids, use_cache=False).loss


def kept_bytes(monkeypatch, config, batch, length, *, autocast):
    """Bytes that the forward pass keeps, weights apart, for (batch, length) tokens."""
    kept = {}
    with tensors_without_data(monkeypatch):
        model = FracForCausalLM(config).train()
        weights = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_of(model, batch, length, autocast=autocast)
    return sum(storage.nbytes() for storage in kept.values())


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors, now and at most. It sees none inside of kernels."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def gone(_):
            self.now -= size
            del self.known[key]

        self.now += size
        self.known[key] = weakref.ref(storage, gone)


def peak_bytes(monkeypatch, config, batch, length, *, policy):
    """Bytes at most in a step of float32 weights under autocast, without the optimizer's."""
    with tensors_without_data(monkeypatch), Alive() as alive:
        model = FracForCausalLM(config).train()
        if policy is not None:
            model.gradient_checkpointing_enable({"policy": policy})
        loss_of(model, batch, length, autocast=True).backward()
    return alive.peak
