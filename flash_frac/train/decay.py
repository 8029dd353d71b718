"""Select the parameters with weight decay."""

from __future__ import annotations

from torch import nn

_DECAYED = (nn.Linear, nn.Embedding, nn.Conv1d)


def decayed_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters with weight decay: weights of projections, conv and embeddings.

    Norms, biases, the bias of Δ, D, the read and write gates and learned timescales have none.
    """
    names = [
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, _DECAYED)
    ]
    known = dict(model.named_parameters())
    return [name for name in names if name in known]
