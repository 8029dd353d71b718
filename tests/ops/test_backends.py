"""The table of backends: a named backend runs or raises, and "auto" reports its choice."""

import logging

import pytest
import torch

from flash_frac.ops import BACKENDS, resolve_backend
from flash_frac.ops.backends import OPERATORS, _log_choice
from tests.backends import INTERPRETED
from tests.ops.contracts import CONTRACTS


@pytest.fixture
def lines(caplog):
    """What the logger says, from the first choice on."""
    _log_choice.cache_clear()
    caplog.set_level(logging.DEBUG, logger="flash_frac.ops")
    yield lambda: [record.getMessage() for record in caplog.records]
    _log_choice.cache_clear()


def run(operator, backend):
    contract = CONTRACTS[operator]
    return contract.run(contract.draw(1, 2, 1), backend)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_backend_that_refuses_raises(monkeypatch, operator):
    row = BACKENDS["torch"]._replace(refusal=lambda x: "it rains")
    monkeypatch.setitem(BACKENDS, "mine", row)
    with pytest.raises(ValueError, match="'mine' cannot run here: it rains; use backend='auto'"):
        run(operator, "mine")


@pytest.mark.parametrize("limited", OPERATORS)
def test_a_limit_is_that_of_one_operator(monkeypatch, limited):
    row = BACKENDS["torch"]._replace(limits={limited: lambda *x: "too wide"})
    monkeypatch.setitem(BACKENDS, "mine", row)
    for operator in OPERATORS:
        if operator == limited:
            with pytest.raises(ValueError, match="'mine' cannot run here: too wide"):
                run(operator, "mine")
        else:
            run(operator, "mine")


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_row_that_is_asked_for_runs(monkeypatch, operator):
    calls = []

    def implementation(*arguments, **options):
        calls.append(operator)
        return getattr(BACKENDS["torch"], operator)(*arguments, **options)

    monkeypatch.setitem(BACKENDS, "mine", BACKENDS["torch"]._replace(**{operator: implementation}))
    run(operator, "torch")
    assert calls == []
    run(operator, "mine")
    assert set(calls) == {operator}


@pytest.mark.parametrize("operator", OPERATORS)
def test_auto_says_what_it_chose_and_why(operator, lines):
    """Once, however often it chooses the same; float64 is for torch everywhere."""
    for _ in range(2):
        run(operator, "auto")
    (line,) = lines()
    assert line.startswith(f"auto runs {operator} on torch (triton: ")
    reason = "float32 only" if INTERPRETED else "Triton kernels "
    assert reason in line


def test_a_name_is_not_logged(lines):
    run("scan", "torch")
    assert lines() == []


def test_auto_takes_the_first_that_can_run(monkeypatch, lines):
    monkeypatch.setitem(BACKENDS, "triton", BACKENDS["torch"])
    assert resolve_backend("auto", torch.zeros(1)) == "triton"
    assert lines() == ["auto runs scan on triton"]
    monkeypatch.delitem(BACKENDS, "triton")
    assert resolve_backend("auto", torch.zeros(1)) == "torch"
    assert lines()[1:] == ["auto runs scan on torch (triton: not in BACKENDS)"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs Triton on a CPU")
def test_triton_on_a_cpu():
    with pytest.raises(ValueError, match=r"'triton' cannot run here: .* CUDA tensors"):
        resolve_backend("triton", torch.zeros(1))


def test_unknown_names():
    with pytest.raises(ValueError, match=r"backend must be one of 'auto', .*, got 'cuda'"):
        resolve_backend("cuda", torch.zeros(1))
