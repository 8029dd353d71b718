"""Decode steps of our model by each plan of `flash_frac.ops.decode.plan` that is worth trying.

Letters: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_frac.bench.models import PARTS, check_inference
from flash_frac.bench.parts import Sizes, describe_steps
from flash_frac.bench.recording import can_record, read, record_decoding
from flash_frac.bench.subjects import Subject, Way, mode_name
from flash_frac.bench.timing import Times, attempt, time_in_turns

# Tokens of one recording.
STEPS = 16


def plans_to_try() -> dict[str, Any]:
    """Plans by name, the present default first."""
    # Imported here, because it imports triton.
    from flash_frac.ops.decode.plan import DEFAULT, StepPlan

    return {
        "default": DEFAULT,
        "fused": StepPlan(fuses=True, most_products=0, early=False),
        "products": StepPlan(fuses=True, most_products=64, early=False),
        "fused, early": StepPlan(fuses=True, most_products=0, early=True),
        "products, early": StepPlan(fuses=True, most_products=64, early=True),
    }


@contextmanager
def using(device: str, chosen: Any) -> Iterator[None]:
    """Run steps on this type of device by a plan."""
    from flash_frac.ops.decode.plan import PLANS

    before = PLANS.get(device)
    PLANS[device] = chosen
    try:
        yield
    finally:
        PLANS.pop(device)
        if before is not None:
            PLANS[device] = before


def plan_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Greedy decoding of STEPS tokens in one graph, by each plan whose inference is right.

    Ours only. Plans are timed in turns, and the error of a row is that of its plan.
    """
    if not subject.is_ours:
        return []
    model, rows = subject.model, []
    device, backend = model.device.type, "triton" if model.device.type == "cuda" else "torch"
    errors: dict[str, float] = {}
    for name, chosen in plans_to_try().items():
        with using(device, chosen):
            check = partial(check_inference, device, backend, model.dtype)
            for error in attempt(subject.label(name), check, failures):
                errors[name] = error
    mode = mode_name(can_record(model))
    for batch in sizes.decode_batches:
        ids = subject.tokens(batch, sizes.prompt)
        calls = {}
        for name in errors:
            with using(device, plans_to_try()[name]):
                record = partial(_recorded, subject, ids)
                for call in attempt(subject.label(name), record, failures):
                    calls[name] = call
        for name, times in time_in_turns(calls).items():
            way, own = Way(subject.label(name), mode), subject._replace(error=errors[name])
            one = Times(*(time / STEPS for time in times))
            rows.append(own.row(way, "step", ids, one, tokens=batch))
            # At once, because a fault of the next plan may end the process.
            print(f"{way.label}: batch {batch}, {one.p50:.3f} ms", flush=True)
    for line in describe_steps(rows):
        print(line, flush=True)
    return rows


def _recorded(subject: Subject, ids: Tensor) -> Any:
    """A call that decodes STEPS tokens; where there are graphs, by one."""
    if can_record(subject.model):
        return record_decoding(subject.model, ids, STEPS, subject.make_cache)
    return partial(_decode, subject.model, ids)


@torch.no_grad()
def _decode(model: Any, ids: Tensor) -> None:
    logits, cache = read(model, ids, None)
    for _ in range(STEPS):
        logits, cache = read(model, logits.argmax(-1), cache)


# What `benchmarks/model.py` measures: all parts, and those that it measures unasked.
MEASURED = PARTS | {"plans": plan_rows}
USUAL = [*PARTS, "small"]
