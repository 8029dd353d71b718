"""Requests for engine tests, and their expected answers."""

import random

import torch

from flash_frac.inference import Request
from tests.models.conftest import make_model
from tests.models.hybrids import KINDS, OWN_LOOP, make_kind

# None is the paper's model.
ALL_KINDS = [None, *KINDS]


def make(kind):
    """In float32, as models are served."""
    return make_model(torch.float32) if kind is None else make_kind(kind, torch.float32)


def random_requests(num, *, seed=0, longest=40, most_new=20, **options):
    """Prompts of random tokens and lengths, with random numbers of new tokens."""
    rng = random.Random(seed)
    return [
        Request(
            prompt=[rng.randrange(3, 61) for _ in range(rng.randint(1, longest))],
            max_new_tokens=rng.randint(1, most_new),
            **options,
        )
        for _ in range(num)
    ]


def expected(model, request):
    """The tokens of transformers' loop, which ends with the first end."""
    ids = torch.tensor([request.prompt], device=model.device)
    made = model.generate(
        ids,
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=list(request.eos_token_ids) or None,
        **OWN_LOOP,
    )
    return made[0, ids.shape[1] :].tolist()


def answers(updates):
    """Tokens by id."""
    found = {}
    for update in updates:
        assert update.error is None
        found.setdefault(update.id, []).extend(update.tokens)
    return found


def run_at_random(engine, requests, seed=0):
    """Submit requests while others run; answers by request, in order."""
    rng, left, updates, ids = random.Random(seed), list(requests), [], []
    while left or engine._has_work():
        while left and rng.random() < 0.4:
            ids.append(engine.submit(left.pop(0)))
        updates += engine.step()
    found = answers(updates)
    return [found[id] for id in ids]
