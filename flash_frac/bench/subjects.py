"""The models that are measured: how they are built, labelled and run.

Letters: B batch, T time, H heads, M modes (a peer's state size), D head channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_frac.bench.mamba3 import Mamba3Config, Mamba3ForCausalLM
from flash_frac.bench.recording import read, state_bytes
from flash_frac.bench.rows import make_row
from flash_frac.bench.timing import OURS, Times, attempt, peak_mib, runnable, time_in_turns
from flash_frac.models import FracForCausalLM


class Way(NamedTuple):
    """How a model is run: the label of its rows, "eager" or "graph", and a call to measure."""

    label: str
    mode: str
    call: Callable[[], object] | None = None


class Subject(NamedTuple):
    """A model on the device, its name, a note on its kernels, its H, M, D and known error.

    `prefill_options` and `make_cache` (for a number of tokens) are for graphs of peers.
    """

    name: str
    model: Any
    note: str
    shape: Mapping[str, int | None]
    error: float | None = None
    prefill_options: Mapping[str, Any] = MappingProxyType({})
    make_cache: Callable[[int], Any] | None = None

    @property
    def is_ours(self) -> bool:
        return isinstance(self.model, FracForCausalLM)

    def label(self, way: str = "") -> str:
        """The implementation of a row: name, size, a peer's note, and how it is run."""
        notes = ", ".join(filter(None, (self.note, way)))
        return f"{self.name} {count(self.model)}" + (f" ({notes})" if notes else "")

    def state_bytes(self, ids: Tensor, failures: list[str]) -> int | None:
        """Bytes of the state of one sequence as long as `ids`; None if that fails."""

        def measure() -> int:
            with torch.no_grad():
                return state_bytes(read(self.model, ids[:1], None)[1])

        found = attempt(self.label("state"), measure, failures)
        return found[0] if found else None

    def tokens(self, batch: int, time: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.model.config.vocab_size, (batch, time), generator=generator)
        return ids.to(self.model.device)

    def row(
        self,
        way: Way,
        passed: str,
        ids: Tensor,
        times: Times,
        *,
        tokens: int | None,
        state_bytes: int | None = None,
    ) -> dict:
        """A row, with the memory of one more call if it can be measured."""
        peak = None
        # The allocator does not see the memory of a replayed CUDA graph.
        if way.call is not None and way.mode == "eager":
            peak = peak_mib(way.call, whole=True)
        return make_row(
            way.label,
            passed,
            {"B": ids.shape[0], "T": ids.shape[1], **self.shape},
            self.model.dtype,
            times,
            tokens=tokens,
            peak=peak,
            error=self.error,
            mode=way.mode,
            state_bytes=state_bytes,
        )

    def rows(
        self,
        passed: str,
        ids: Tensor,
        ways: Iterable[Way],
        failures: list[str],
        state_bytes: int | None = None,
    ) -> list[dict]:
        """Rows of the ways that run, timed interleaved on all of `ids`."""
        by_label = {way.label: way for way in ways}
        functions = {way.label: way.call for way in by_label.values() if way.call is not None}
        times = time_in_turns(runnable(functions, failures))
        size = {"tokens": ids.numel(), "state_bytes": state_bytes}
        return [self.row(by_label[label], passed, ids, x, **size) for label, x in times.items()]


def build(config: Any, dtype: torch.dtype, device: torch.device | str) -> Any:
    """A causal language model with random weights, built directly on the device."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        if isinstance(config, Mamba3Config):
            return Mamba3ForCausalLM(config, dtype).eval()
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # generate must run to the full length, whatever tokens the random weights produce.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def mode_name(by_graph: bool) -> str:
    return "graph" if by_graph else "eager"


def our_subject(model: FracForCausalLM, error: float | None) -> Subject:
    config = model.config
    heads, modes = config.num_attention_heads, config.frac_num_modes
    shape = {"H": heads, "M": modes, "D": config.frac_head_dim}
    return Subject(OURS, model, "", shape, error)


def count(model: Any) -> str:
    """The number of parameters; shared ones count once."""
    number = sum(parameter.numel() for parameter in model.parameters())
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.2f}{letter}"
    return f"{number / 1e3:.1f}K"


def set_backend(model: Any, backend: str) -> Any:
    """Set the backend of every layer that has one."""
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = backend
    return model


def make_generator(subject: Subject, failures: list[str]) -> Any:
    """A `Generator` for the model; None for a peer, or if it cannot be built."""

    def make() -> Any:
        from flash_frac.inference import Generator

        return Generator(subject.model)

    made = attempt(subject.label("Generator"), make, failures) if subject.is_ours else []
    return made[0] if made else None
