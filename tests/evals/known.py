"""Models with known answers, and requests for them."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from flash_frac.data import byte_tokenizer
from flash_frac.evals.suites import Request, Unit
from flash_frac.models import FracForCausalLM
from tests.tiny import tiny_config

SAMPLES = Path(__file__).parent / "samples"


def tiny_frac(**options):
    torch.manual_seed(0)
    model = FracForCausalLM(tiny_config(**options))
    # Away from the start, where nothing depends on the context.
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def request(suite, task, lm, *, data_dir=SAMPLES, length=None, limit=None):
    known = {known.name: known for known in suite.tasks}
    unit = Unit(task=known[task], length=length)
    return Request(lm=lm, suite=suite, unit=unit, data_dir=data_dir, limit=limit)


def reader(answer, max_length=2048):
    """A model for lm-eval that gives `answer(prompt)`, and remembers what it was asked."""
    from lm_eval.api.model import LM

    class Reader(LM):
        def __init__(self):
            super().__init__()
            self.tokenizer = byte_tokenizer()
            self.max_length = max_length
            self.prompts, self.options = [], []

        def tok_encode(self, text):
            return self.tokenizer.encode(text)

        def generate_until(self, requests, disable_tqdm=False):
            self.prompts += [r.args[0] for r in requests]
            self.options += [r.args[1] for r in requests]
            return [answer(r.args[0]) for r in requests]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    return Reader()


class Bigram(nn.Module):
    """P(next | token) from a table; its cache counts the tokens it was given."""

    def __init__(self, logits_VV):
        super().__init__()
        self.logits = nn.Parameter(logits_VV)
        self.calls = []

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        self.calls.append((input_ids.shape[1], past_key_values, use_cache))
        seen = (past_key_values or 0) + input_ids.shape[1]
        return SimpleNamespace(logits=self.logits[input_ids], past_key_values=seen)
