"""Compare the operators and all their gradients with plain references, on fresh random inputs.

With x the operator's result, r that of the reference in the same dtype and e that of the reference
in float64, the operator passes if

    |x - e| / |e| <= 2 (|r - e| / |e| + eps / 2),

the rule of this project's tests. eps is that of the coarsest input, because tensor cores that
multiply bfloat16 numbers take their weights in bfloat16 too, whatever the dtype of the sum. For the
Triton scan r is the torch backend, which is itself compared with the recurrence. The error of a few
numbers varies at random, so errors are root mean squares over several draws.
Letters: B batch, T time, H heads, D head channels, M modes, I = H D, E width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from flash_frac.doctor import REPORT_IT, Finding
from flash_frac.layers import FracMixer, RMSNorm
from flash_frac.layers.norm import GatedRMSNorm
from flash_frac.ops import (
    BACKENDS,
    Controls,
    ControlSettings,
    causal_conv,
    delta_scan,
    delta_step,
    frac_scan,
    frac_step,
    swiglu,
)
from flash_frac.ops.loss.api import linear_cross_entropy
from flash_frac.ops.testing import random_delta_inputs, random_inputs, relative_error

HEADS, MODES, CHANNELS, TAPS = 2, 16, 16, 4


class Draw(NamedTuple):
    """Settings for random inputs; `normal(*shape)` draws float64 on the device."""

    backend: str
    device: str
    dtype: torch.dtype
    seed: int
    normal: Callable[..., Tensor]


class Case(NamedTuple):
    """An operator, its references in the same dtype and in float64, and inputs for all three.

    The three take the inputs and return results in the order of `names`; gradients follow.
    """

    operator: Callable[..., Any]
    reference: Callable[..., Any]
    exact: Callable[..., Any]
    inputs: dict[str, Tensor]
    names: tuple[str, ...]


def checks(device: str, seed: int, *, quick: bool) -> list[tuple[str, Callable[[], list[Finding]]]]:
    """Name and check of every operator and backend that can run here."""
    found = []
    for backend in ("torch", "triton"):
        dtypes = dtypes_of(backend, device)
        if not dtypes:
            continue
        interpreted = backend == "triton" and device == "cpu"
        lengths = [1, 0, 12, 7] if interpreted else [1, 0, 63, 36]
        scan = partial(sequences, operator=frac_scan, random=partial(random_inputs, rho_eps=1e-6))
        delta = partial(sequences, operator=delta_scan, random=random_delta_inputs)
        time, packed = 20 if interpreted else 100, {"time": sum(lengths), "lengths": lengths}
        scans = [partial(scan, time=time)] * 3
        if not quick and not interpreted:
            scans.append(partial(scan, time=1000))
        cases = {
            "scan": scans,
            "packed scan": [partial(scan, **packed)] * 3,
            "step": [step] * 3,
            "delta rule": [partial(delta, time=time)] * 3,
            "packed delta rule": [partial(delta, **packed)] * 3,
            "delta step": [one_delta_step] * 3,
            "controls": [control] * 3,
            "convolution": [convolution] * 3,
            "packed convolution": [partial(convolution, lengths=lengths)] * 3,
            "norm": [norm] * 3,
            "gated norm": [gated_norm] * 3,
            "swiglu": [gated_product] * 3,
        }
        # The loss has one implementation for all devices, outside the backends.
        cases |= {"cross-entropy": [cross_entropy] * 3} if backend == "torch" else {}
        for operator, draws in cases.items():
            draws = draws[:1] if interpreted else draws
            name = f"{operator} ({backend})" if operator != "cross-entropy" else operator
            found.append((name, partial(check, name, draws, backend, device, dtypes, seed)))
    return found


def dtypes_of(backend: str, device: str) -> list[torch.dtype]:
    """The dtypes that a backend supports here; float16 only on GPUs."""
    wanted = [torch.float32, torch.bfloat16, *([torch.float16] if device == "cuda" else [])]
    here = [torch.empty(0, dtype=dtype, device=device) for dtype in wanted]
    return [x.dtype for x in here if BACKENDS[backend].refusal(x) is None]


def check(
    name: str,
    draws: list[Callable[[Draw], Case]],
    backend: str,
    device: str,
    dtypes: list[torch.dtype],
    seed: int,
) -> list[Finding]:
    """One finding on an operator, over all dtypes and draws."""
    shown, worst = [], 0.0
    for dtype in dtypes:
        pooled: dict[str, list[tuple[float, ...]]] = {}
        for number, make in enumerate(draws):
            # Drawn on the CPU, so that a seed gives the same inputs everywhere.
            generator = torch.Generator().manual_seed(seed + number)

            def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
                return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

            case = make(Draw(backend, device, dtype, seed + number, normal))
            # cuDNN's convolutions round float32 to 10 bits, which would loosen our tolerance.
            with torch.backends.cudnn.flags(enabled=False):
                for result, triple in errors(case, normal).items():
                    pooled.setdefault(result, []).append(triple)
        largest = 0.0
        for result, triples in pooled.items():
            rows = torch.tensor(triples, dtype=torch.float64)
            mine, theirs, rounding = rows.square().mean(0).sqrt().tolist()
            allowed = 2 * (theirs + rounding)
            # Written as `not <=` so that NaN is wrong.
            if not mine <= allowed:
                what = f"{result} in {_short(dtype)} differs from float64 by {mine:.1e}; the "
                what += f"tolerance is {allowed:.1e} (seed {seed})"
                remedy = f"do not use backend={backend!r} on this machine; update torch and triton;"
                return [Finding(name, "wrong", what, f"{remedy} if it persists, {REPORT_IT}")]
            worst, largest = max(worst, mine / allowed), max(largest, mine)
        shown.append(f"{largest:.1e} in {_short(dtype)}")
    found = f"error {', '.join(shown)}; {worst:.0%} of the tolerance"
    return [Finding(name, "ok", found)]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def errors(case: Case, normal: Callable[..., Tensor]) -> dict[str, tuple[float, float, float]]:
    """For each result and gradient: its error, that of the reference, and one rounding."""
    weights: list[Tensor] = []

    def results(function: Callable[..., Any], *, double: bool) -> list[Tensor]:
        leaves = [(x.double() if double else x).detach() for x in case.inputs.values()]
        leaves = [x.clone().requires_grad_() for x in leaves]
        outputs = list(function(*leaves))
        # In bfloat16, so that the weights are equal in every dtype.
        weights.extend(normal(*y.shape).to(torch.bfloat16) for y in outputs[len(weights) :])
        above = [w.to(y.dtype) for w, y in zip(weights, outputs, strict=True)]
        gradients = torch.autograd.grad(outputs, leaves, above)
        return [*(y.detach() for y in outputs), *gradients]

    exact = results(case.exact, double=True)
    reference, got = (results(f, double=False) for f in (case.reference, case.operator))
    names = [*case.names, *(f"the gradient of {name}" for name in case.inputs)]
    largest, found = max(x.numel() for x in exact), {}
    eps = max(torch.finfo(x.dtype).eps for x in case.inputs.values())
    for name, x, r, e in zip(names, got, reference, exact, strict=True):
        if x.dtype != r.dtype or x.shape != r.shape:
            raise ValueError(f"{name} must be {r.dtype} {tuple(r.shape)}, got {x.dtype} {x.shape}")
        # Small results sum many terms that cancel: their rounding is that of the terms, which add
        # up like the steps of a random walk.
        terms = largest / x.numel() if x.numel() < 64 else 1
        rounding = eps / 2 * math.sqrt(terms)
        found[name] = (relative_error(x, e), relative_error(r, e), rounding)
    return found


def sequences(
    draw: Draw,
    operator: Callable[..., Any],
    random: Callable[..., Any],
    *,
    time: int,
    lengths: list[int] | None = None,
) -> Case:
    """A row, or sequences packed into one, with initial states; `random` draws the inputs."""
    sizes = (1, time, HEADS, MODES, CHANNELS)
    inputs = random(*sizes, dtype=draw.dtype, seed=draw.seed, device=draw.device)
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], device=draw.device).cumsum(0)
    state = draw.normal(len(lengths or [1]), HEADS, MODES, CHANNELS).float()

    def of(backend: str) -> Callable[..., Any]:
        return lambda *x: operator(
            *x[:-1], initial_state=x[-1], cu_seqlens=cu_seqlens, backend=backend
        )

    simpler = "torch" if draw.backend == "triton" else "recurrent"
    given = {**inputs._asdict(), "initial_state": state}
    return Case(of(draw.backend), of(simpler), of("recurrent"), given, ("y", "state"))


def _one_token(draw: Draw, random: Callable[..., Any]) -> dict[str, Tensor]:
    """Inputs for one token of four sequences, and their states."""
    sizes = (4, 1, HEADS, MODES, CHANNELS)
    inputs = random(*sizes, dtype=draw.dtype, seed=draw.seed, device=draw.device)
    given = {name: x[:, 0].contiguous() for name, x in inputs._asdict().items()}
    return {**given, "state": draw.normal(4, HEADS, MODES, CHANNELS).float()}


def step(draw: Draw) -> Case:
    """One token of four sequences."""
    given = _one_token(draw, random_inputs)

    def plain(u: Tensor, read: Tensor, write: Tensor, log_decay: Tensor, state: Tensor) -> Any:
        r, w, v = (x.to(state.dtype)[..., None] for x in (read, write, u))
        state = log_decay.exp()[..., None] * state + w * v.transpose(-1, -2)
        return (r * state).sum(-2).to(u.dtype), state

    return Case(partial(frac_step, backend=draw.backend), plain, plain, given, ("y", "new state"))


def one_delta_step(draw: Draw) -> Case:
    """One token of four sequences, by the delta rule."""
    given = _one_token(draw, random_delta_inputs)

    def plain(*x: Tensor) -> Any:
        q, k, v, beta, log_decay, state = (t.to(x[-1].dtype) for t in x)
        state = log_decay.exp()[..., None, None] * state
        write = beta[..., None] * (v - torch.einsum("bhk,bhkd->bhd", k, state))
        state = state + k[..., None] * write[..., None, :]
        return torch.einsum("bhk,bhkd->bhd", q, state).to(x[2].dtype), state

    return Case(partial(delta_step, backend=draw.backend), plain, plain, given, ("y", "new state"))


class _ControlsAlone(FracMixer):
    """A layer that maps logits directly to read, write and log_decay."""

    def __init__(self, settings: ControlSettings, backend: str) -> None:
        super().__init__(
            1, num_heads=HEADS, head_dim=1, num_modes=MODES, settings=settings, backend=backend
        )
        self.dyn_proj = self.rw_proj = nn.Identity()

    def forward(self, dyn: Tensor, rw: Tensor) -> Controls:  # pyright: ignore
        return self.controls(dyn, rw)


def control(draw: Draw) -> Case:
    """Controls from logits, with some decays at either end of their range."""
    s = ControlSettings(alpha_min=0.1, alpha_max=0.9)
    with torch.random.fork_rng(devices=[]):
        layer = _ControlsAlone(s, draw.backend).to(draw.device)
    names = ("dt_bias", "read_residual_logit", "write_residual_scale")
    tau = layer.base_log_tau.double().exp()

    def operator(dyn: Tensor, rw: Tensor, *parameters: Tensor) -> Controls:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (dyn, rw))

    def plain(dyn: Tensor, rw: Tensor, dt_bias: Tensor, *gates: Tensor) -> Any:
        wide = dt_bias.dtype
        logits = dyn.to(wide).unflatten(-1, (3, HEADS))[..., None]
        share = logits.sigmoid()
        delta = F.softplus(logits[..., 0, :, :] + dt_bias[:, None]).clamp(s.dt_min, s.dt_max)
        alpha = s.alpha_min + (s.alpha_max - s.alpha_min) * share[..., 1, :, :]
        lam = s.lambda_min + (s.lambda_max - s.lambda_min) * share[..., 2, :, :]
        rate = delta * lam ** (1 / alpha) / tau.to(wide)
        rate = rate.clamp(-math.log1p(-s.rho_eps), -math.log(s.rho_eps))
        prior = -alpha * tau.log().to(wide)
        rw = rw.to(wide).unflatten(-1, (2, HEADS, MODES))
        gated = (gate.sigmoid() * x for gate, x in zip(gates, rw.unbind(-3), strict=True))
        read, write = ((prior + x).softmax(-1) for x in gated)
        return read, write * -torch.expm1(-rate), -rate

    given = {
        "dyn_logits": 2 * draw.normal(2, 100, 3 * HEADS).to(draw.dtype),
        "rw_logits": 2 * draw.normal(2, 100, 2 * HEADS * MODES).to(draw.dtype),
        "dt_bias": draw.normal(HEADS).float(),
        **{name: draw.normal(1).float() for name in names[1:]},
    }
    return Case(operator, plain, plain, given, Controls._fields)


def convolution(draw: Draw, *, lengths: list[int] | None = None) -> Case:
    """A batch of two, or sequences packed into a row, each with its initial window."""
    width, time = 48, 40 if lengths is None else sum(lengths)
    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths], device=draw.device).cumsum(0)

    def operator(x: Tensor, weight: Tensor, bias: Tensor, window: Tensor) -> Any:
        options = {"cu_seqlens": cu_seqlens, "backend": draw.backend}
        return causal_conv(x, weight, bias, window=window, **options)

    def plain(x: Tensor, weight: Tensor, bias: Tensor, window: Tensor) -> Any:
        rows, joined = (x.split(1), 0) if lengths is None else (x.split(lengths, 1), 1)
        outputs, windows = [], []
        for row, before in zip(rows, window.split(1), strict=True):
            whole = torch.cat([before, row.transpose(1, 2)], 2)
            if row.shape[1]:
                y = F.conv1d(whole.to(weight.dtype), weight, bias, groups=width)
                outputs.append(F.silu(y).transpose(1, 2).to(x.dtype))
            windows.append(whole[..., whole.shape[2] - TAPS + 1 :])
        return torch.cat(outputs, joined), torch.cat(windows)

    given = {
        "x": draw.normal(2 if lengths is None else 1, time, width).to(draw.dtype),
        "weight": draw.normal(width, 1, TAPS).float(),
        "bias": draw.normal(width).float(),
        "window": draw.normal(len(lengths or [0, 0]), width, TAPS - 1).to(draw.dtype),
    }
    return Case(operator, plain, plain, given, ("u", "new window"))


def norm(draw: Draw) -> Case:
    """RMSNorm of rows of 96."""
    module = RMSNorm(96, backend=draw.backend)

    def plain(x: Tensor, weight: Tensor) -> Any:
        return [F.rms_norm(x.to(weight.dtype), (96,), weight, module.eps).to(x.dtype)]

    given = {"x": draw.normal(60, 96).to(draw.dtype), "weight": draw.normal(96).float()}

    def operator(x: Tensor, weight: Tensor) -> Any:
        return [functional_call(module, {"weight": weight}, (x,))]

    return Case(operator, plain, plain, given, ("y",))


def gated_norm(draw: Draw) -> Case:
    """The end of a layer: direct term, gate and norm."""
    module = GatedRMSNorm(96, gate_bias=0.5, backend=draw.backend)

    def operator(x: Tensor, gate: Tensor, weight: Tensor, d: Tensor, u: Tensor) -> Any:
        return [functional_call(module, {"weight": weight}, (x, gate, (d, u)))]

    def plain(x: Tensor, gate: Tensor, weight: Tensor, d: Tensor, u: Tensor) -> Any:
        mixed = (x.to(weight.dtype) + d * u.to(weight.dtype)).flatten(-2)
        gated = mixed * F.silu(gate.to(weight.dtype) + module.gate_bias)
        return [F.rms_norm(gated, (96,), weight, module.eps).to(gate.dtype)]

    given = {
        "x": draw.normal(2, 30, 6, 16).to(draw.dtype),
        "gate": draw.normal(2, 30, 96).to(draw.dtype),
        "weight": draw.normal(96).float(),
        "D": draw.normal(6, 16).float(),
        "u": draw.normal(2, 30, 6, 16).to(draw.dtype),
    }
    return Case(operator, plain, plain, given, ("y",))


def gated_product(draw: Draw) -> Case:
    """The middle of an MLP, whose gate and up are halves of one tensor."""

    def operator(both: Tensor) -> Any:
        return [swiglu(*both.chunk(2, -1), backend=draw.backend)]

    def plain(both: Tensor) -> Any:
        wide = torch.promote_types(both.dtype, torch.float32)
        gate, up = both.to(wide).chunk(2, -1)
        return [(gate / (1 + torch.exp(-gate)) * up).to(both.dtype)]

    given = {"gate and up": 2 * draw.normal(60, 192).to(draw.dtype)}
    return Case(operator, plain, plain, given, ("y",))


def cross_entropy(draw: Draw) -> Case:
    """The head and its loss, in chunks; every third label is ignored."""
    labels = draw.normal(300, 64).argmax(-1)
    labels[::3] = -100

    def operator(hidden: Tensor, weight: Tensor) -> Any:
        return [linear_cross_entropy(hidden, weight, labels, chunk_tokens=64)]

    def plain(hidden: Tensor, weight: Tensor) -> Any:
        logits = hidden @ weight.T
        wide = torch.promote_types(logits.dtype, torch.float32)
        return [F.cross_entropy(logits.to(wide), labels)]

    given = {"hidden": draw.normal(300, 32), "weight": draw.normal(64, 32)}
    given = {name: x.to(draw.dtype) for name, x in given.items()}
    return Case(operator, plain, plain, given, ("loss",))
