"""Time one needle-in-a-haystack sample on a model shape with random weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import flash_frac.models  # noqa: F401  (registers Frac with the Auto classes)
from flash_frac.data import load_tokenizer
from flash_frac.evals import niah
from flash_frac.evals.suites import Request
from flash_frac.inference.generator import PIECE, Generator


class Sample(NamedTuple):
    """Cost of one sample, from its text to the text of the answer.

    Fields:
        seconds: total time; `prompt_seconds` is the part before the first answer token.
        peak_mib: peak of the GPU allocator; None on a CPU.
    """

    seconds: float
    prompt_seconds: float
    tokens_read: int
    tokens_written: int
    peak_mib: int | None
    parameters: int


class _Tokenizer(NamedTuple):
    """The part of a language model that making the prompt needs."""

    tokenizer: Any


def time_one_sample(shape: Path, length: int, tokenizer_name: str) -> Sample:
    """Build an S-NIAH-1 prompt of this length, read it and generate 128 tokens.

    Memory and time do not depend on the weights, which are drawn with seed 0, in bfloat16 on a
    GPU. A shorter prompt first compiles kernels and captures graphs.

    Args:
        shape: folder of a config.json.
        length: tokens of prompt and answer, counted as in RULER.
        tokenizer_name: a folder, or "bytes".
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(tokenizer_name)
    unit = niah.SUITE.units(("niah_single_1",), (length,))[0]
    # The haystack sentence needs no file, and naming a folder prevents downloads.
    request = Request(
        lm=_Tokenizer(tokenizer), suite=niah.SUITE, unit=unit, data_dir=shape, limit=1
    )
    row = niah.examples(request)[0]
    text = f"{row['input']} {row['gen_prefix']}"
    model = _random_model(shape, device)
    generator = Generator(model)

    def answer(text: str, most: int | None = None) -> tuple[float, float, int]:
        start = _now(device)
        ids = torch.tensor([tokenizer.encode(text)[:most]], device=device)
        generator.generate(ids, max_new_tokens=1)
        prompt_seconds = _now(device) - start
        start = _now(device)
        ids = torch.tensor([tokenizer.encode(text)[:most]], device=device)
        new = generator.generate(ids, max_new_tokens=niah.ANSWER_TOKENS)[0, ids.shape[1] :]
        tokenizer.decode(new.tolist())
        return _now(device) - start, prompt_seconds, ids.shape[1]

    # Same piece lengths as in the timed prompt: a full piece and the last one.
    num_tokens = len(tokenizer.encode(text))
    answer(text, min(PIECE, num_tokens) + num_tokens % PIECE)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, prompt_seconds, read = answer(text)
    peak = torch.cuda.max_memory_allocated(device) >> 20 if device.type == "cuda" else None
    return Sample(seconds, prompt_seconds, read, niah.ANSWER_TOKENS, peak, model.num_parameters())


def _random_model(shape: Path, device: torch.device) -> Any:
    config = AutoConfig.from_pretrained(shape, trust_remote_code=False)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
