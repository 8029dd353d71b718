"""The operator benchmark, at sizes that are quick on a CPU."""

import sys

import ops as script
import pytest
import torch

from flash_frac.bench import ops, peers
from flash_frac.bench.delta import DELTA
from flash_frac.bench.peers import Operation
from flash_frac.bench.rows import read_rows
from flash_frac.ops.testing import random_inputs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="would time the GPU's events")
SIZES = [1, 48, 2, 4, 8]
PASSES = ("forward", "forward+backward")


def measured(**options):
    failures = []
    rows = ops.measure_operations(SIZES, failures, backends=("torch",), device="cpu", **options)
    return {(row["implementation"], row["pass"]): row for row in rows}, failures


def test_a_missing_peer_does_not_end_the_run(monkeypatch, capsys):
    for name in ("fla", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    rows, failures = measured(peers=peers.OP_PEERS)
    (attention,) = {name for name, _ in rows if "SDPA" in name}
    for passed in ("forward", "forward+backward"):
        ours, theirs = rows["flash_frac torch", passed], rows[attention, passed]
        assert (ours["B"], ours["T"], ours["H"], ours["M"], ours["D"]) == tuple(SIZES)
        assert (theirs["B"], theirs["T"], theirs["H"], theirs["D"]) == (1, 48, 16, 128)
        assert ours["error"] is not None and theirs["error"] is None
    assert len(rows) == 4 and len(failures) == 3
    out = capsys.readouterr().out
    assert all(f"left out: {name}" in out for name in ("chunk_gla", "gated_delta_rule", "ssd"))


def test_a_peer_that_refuses_its_backward_keeps_its_forward():
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise RuntimeError("not with this compiler")

    def peer(inputs):
        shape = {"H": 2, "M": 4, "D": 8}
        return Operation("peer 1.0 refusing", shape, Refusing.apply, (inputs.u,))

    subject = ops.SCAN._replace(peers={"refusing": peer})
    rows, failures = measured(peers=["refusing"], subject=subject)
    assert [passed for name, passed in rows if name == "peer 1.0 refusing"] == ["forward"]
    assert len(rows) == 3 and "not with this compiler" in failures[0]


def test_without_peers():
    rows, failures = measured()
    assert {name for name, _ in rows} == {"flash_frac torch"} and not failures


def test_the_delta_rule(monkeypatch):
    """Its rows differ from those of the scan by their pass, and fla may be missing."""
    monkeypatch.setitem(sys.modules, "fla", None)
    rows, failures = measured(subject=DELTA, peers=DELTA.peers)
    assert list(rows) == [
        ("flash_frac torch", "delta forward"),
        ("flash_frac torch", "delta forward+backward"),
    ]
    assert all((row["H"], row["M"], row["D"]) == (2, 4, 8) for row in rows.values())
    assert all(float(row["error"]) < 0.1 for row in rows.values())
    assert len(failures) == 1 and "gated_delta_rule" in failures[0]


@pytest.mark.parametrize("factor", [1.1, torch.nan])
def test_wrong_results_are_not_timed(factor):
    inputs = random_inputs(*SIZES, dtype=torch.bfloat16)
    right = ops.our_scan(inputs, "torch")
    wrong = right._replace(function=lambda *x: factor * right.function(*x))
    with pytest.raises(SystemExit, match=r"is wrong by .*: not timed"):
        ops.check_operations([wrong], inputs)


def test_the_error_of_a_peer_that_computes_our_scan_is_recorded():
    """As chunk_gla does: its error is told, even if it is large."""
    inputs = random_inputs(*SIZES, dtype=torch.bfloat16)
    ours = ops.our_scan(inputs, "torch")
    twice = ours._replace(name="peer 1.0", function=lambda *x: 2 * ours.function(*x))
    errors = ops.check_operations([ours, twice], inputs)
    assert errors["flash_frac torch"] < 0.1 and errors["peer 1.0"] == pytest.approx(1, rel=0.1)


def test_the_script_on_a_cpu(tmp_path, monkeypatch):
    # In the process itself, because starting others takes longer than all the rest.
    monkeypatch.setattr(ops, "process_peak_mib", lambda *arguments: 1.0)
    path = tmp_path / "cpu.csv"
    script.main(["--time", "64", "--repeats", "2", "--out", str(path), "--commit", "abc"])
    rows = read_rows(path)
    passes = [f"{name}{passed}" for name in ("", "delta ") for passed in PASSES]
    names = ["plain chunk-32 loop", "flash_frac torch"]
    expected = [(passed, name) for passed in passes for name in names]
    assert [(row["pass"], row["implementation"]) for row in rows] == expected
    assert all(row["commit"] == "abc" and row["T"] == "64" and row["error"] for row in rows)


@pytest.mark.parametrize("operator", ops.ON_CPU)
def test_a_wrong_scan_has_no_row_on_a_cpu(monkeypatch, operator):
    case = ops.ON_CPU[operator]
    right = case.implementations["flash_frac torch"]
    wrong = {"flash_frac torch": lambda inputs: [1.1 * x for x in right(inputs)]}
    monkeypatch.setitem(ops.ON_CPU, operator, case._replace(implementations=wrong))
    with pytest.raises(SystemExit, match=r"flash_frac torch is wrong by .*: not timed"):
        ops.measure_cpu(operator, 64, 2)
