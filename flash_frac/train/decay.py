"""Which parameters weight decay is for."""

from __future__ import annotations

from torch import nn

_DECAYED = (nn.Linear, nn.Embedding, nn.Conv1d)


def decayed_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that weight decay is for: weights of projections, conv, embeddings.

    Norms, biases, the bias of Δ, D, the gates of read and write and learned timescales are spared.
    """
    names = [
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, _DECAYED)
    ]
    known = dict(model.named_parameters())
    return [name for name in names if name in known]
