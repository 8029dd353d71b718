"""Check a tiny model in every mode of execution, and measure the speed of one layer."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from flash_frac.doctor import REPORT_IT, Finding
from flash_frac.doctor.operators import dtypes_of
from flash_frac.layers import FracMixer
from flash_frac.ops.testing import relative_error

BATCH, LENGTH, MODELS = 8, 40, 4


def check(device: str, seed: int) -> list[Finding]:
    """Compare parallel, token-by-token and packed logits with float64, and reload a saved model.

    Errors may be at most 2 (error of the recurrence in float32 + one rounding), as root mean
    squares over several models.
    """
    from flash_frac.models import FracConfig, FracForCausalLM

    config = FracConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    rows, reload = [], []
    for number in range(MODELS):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed + number)
            model = FracForCausalLM(config).eval()
            model.to(torch.device(device))  # pyright: ignore[reportArgumentType]
            ids = torch.randint(3, 64, (BATCH, LENGTH)).to(device)
            got = [model(ids).logits, _decode(model, ids), _packed(model, ids)]
            if not reload:
                reload.append(_reload(model, ids))
            _set_backend(model, "recurrent")
            got.append(model(ids).logits)
            exact = model.double()(ids).logits
        rows.append([relative_error(logits, exact) for logits in got])
    *means, plain = torch.tensor(rows).square().mean(0).sqrt().tolist()
    allowed = 2 * (plain + torch.finfo(torch.float32).eps / 2)
    ways = dict(zip(("parallel", "token by token", "packed"), means, strict=True))
    # Written as `not <=` so that NaN is wrong.
    wrong = [f"{name} {error:.1e}" for name, error in ways.items() if not error <= allowed]
    if wrong:
        found = f"logits differ from float64 by more than {allowed:.1e}: {', '.join(wrong)} "
        remedy = f"see which operator is wrong above; if none is, {REPORT_IT}"
        return [Finding("model", "wrong", f"{found}(seed {seed})", remedy), *reload]
    found = "parallel, token-by-token and packed logits agree with float64: "
    found += f"error {max(means):.1e}, {max(means) / allowed:.0%} of the tolerance"
    return [Finding("model", "ok", found), *reload]


def _decode(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits from decoding token by token."""
    cache, logits = None, []
    for token in ids.split(1, 1):
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, 1)


def _packed(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of all sequences packed into one row."""
    cu_seqlens = LENGTH * torch.arange(BATCH + 1, device=ids.device)
    return model(ids.view(1, -1), cu_seqlens=cu_seqlens).logits.view(*ids.shape, -1)


def _set_backend(model: nn.Module, backend: str) -> None:
    for module in model.modules():
        if hasattr(module, "backend"):
            setattr(module, "backend", backend)  # noqa: B010 - typed as a tensor or a module


def _reload(model: nn.Module, ids: Tensor) -> Finding:
    """Whether a saved and reloaded model gives bit-identical logits."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)  # pyright: ignore
            loaded = type(model).from_pretrained(folder).to(ids.device).eval()  # pyright: ignore
    finally:
        if shown:
            logging.enable_progress_bar()
    if torch.equal(loaded(ids).logits, model(ids).logits):
        return Finding("checkpoint", "ok", "a saved and reloaded model gives identical logits")
    what = "a saved and reloaded model gives different logits"
    return Finding(
        "checkpoint", "wrong", what, f"update safetensors and transformers, or {REPORT_IT}"
    )


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of CPU threads of torch within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def speed(device: str) -> list[Finding]:
    """Tokens/s of one layer: for each backend on a GPU; with one and with all threads on a CPU."""
    if device == "cuda":
        backends = [b for b in ("triton", "torch") if torch.bfloat16 in dtypes_of(b, device)]
        rates = {name: _rates(name, device, torch.bfloat16, 2048, 8192) for name in backends}
        found = "one layer of width 2048, 8192 tokens, bfloat16: " + _shown(rates)
        if len(rates) == 2:
            ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
            found += f"; triton is {ratios[0]:.1f} and {ratios[1]:.1f} times as fast as torch"
        return [Finding("speed", "ok", found)]
    rates = {}
    for number in sorted({1, torch.get_num_threads()}):
        with threads(number):
            name = f"{number} thread" + "s" * (number > 1)
            rates[name] = _rates("torch", device, torch.float32, 256, 512)
    found = "one layer of width 256, 512 tokens, float32: " + _shown(rates)
    single, *more = rates.values()
    if more and more[0][1] < single[1] / 2:
        remedy = "threads slow each other down, as on a busy machine: set OMP_NUM_THREADS=1"
        return [Finding("speed", "warning", found, remedy)]
    return [Finding("speed", "ok", found)]


def _shown(rates: dict[str, tuple[float, float]]) -> str:
    return "; ".join(
        f"{name}: {forward:,.0f} tokens/s forward, {both:,.0f} with backward"
        for name, (forward, both) in rates.items()
    )


def _rates(
    backend: str, device: str, dtype: torch.dtype, width: int, length: int
) -> tuple[float, float]:
    """Tokens per second, forward only and with backward."""
    with torch.random.fork_rng(devices=[]):
        layer = FracMixer(width, num_heads=width // 64, head_dim=128, backend=backend)
        x = torch.randn(1, length, width)
    layer, x = layer.to(device, dtype), x.to(device, dtype)
    forward, both = (_median(partial(f, layer, x), device) for f in (_forward, _forward_backward))
    return length / forward, length / both


def _forward(layer: FracMixer, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def _forward_backward(layer: FracMixer, x: Tensor) -> None:
    layer(x)[0].sum().backward()


def _median(function: Callable[[], None], device: str) -> float:
    """Seconds per call: the median of up to 20 calls within half a second, after one warm-up."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    function()
    while len(times) < 20 and sum(times) < 0.5:
        wait()
        start = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
