"""The doctor: passes here, and reports each problem by name with a non-zero exit status."""

import math
import os
import tempfile

import pytest
import torch

import flash_frac.doctor as doctor
from flash_frac.doctor import machine, model, operators
from flash_frac.doctor.machine import Facts
from flash_frac.ops.backends import BACKENDS, OPERATORS, Backend
from flash_frac.ops.scan.chunk import chunk_scan
from flash_frac.ops.scan.reference import step

SEED = 20
HEALTHY = Facts("12.8", "3.7.1", "2.4.0", (9, 0), nvidia_smi=True, interpreted=False)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Kernels have tests of their own, and the interpreter would take minutes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def broken_scan(monkeypatch):
    def put(change):
        def scan(*arguments):
            y, state = chunk_scan(*arguments)
            return change(y), state

        backend = Backend(scan, step, lambda u: None)
        monkeypatch.setitem(BACKENDS, "torch", backend)

    return put


def named(report, name):
    return [finding for finding in report.findings if finding.name == name]


def test_a_whole_examination(tmp_path, monkeypatch):
    """All is well here, nothing stays on the disk, and random numbers and threads are as before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    report = doctor.examine(seed=SEED)
    assert report.wrong == ()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == threads
    assert len({finding.name for finding in report.findings}) == len(report.findings)
    names = {"versions", "requirements", "device", "backend", "model", "checkpoint", "speed"}
    kinds = ("scan", "packed scan", "step", "controls", "convolution", "packed convolution")
    kinds += ("delta rule", "packed delta rule", "delta step", "norm", "gated norm", "swiglu")
    names |= {f"{kind} (torch)" for kind in kinds} | {"cross-entropy"}
    assert names <= {finding.name for finding in report.findings}
    for name in ("scan (torch)", "cross-entropy"):
        found = named(report, name)[0].found
        assert "float32" in found and "bfloat16" in found
    assert f"torch {torch.__version__}" in named(report, "versions")[0].found
    assert "tokens/s forward" in named(report, "speed")[0].found
    assert str(report).splitlines()[-1] == "No problems found."


def test_a_quick_one_is_a_part_of_it():
    names = [name for name, _ in operators.checks("cpu", 0, quick=True)]
    assert names == [name for name, _ in operators.checks("cpu", 0, quick=False)]
    shortened = dict(operators.checks("cpu", SEED, quick=True))["scan (torch)"]()
    assert shortened[0].status == "ok"


def test_a_scan_off_by_a_thousandth_is_found(broken_scan, monkeypatch, capsys):
    broken_scan(lambda y: y * (1 + 1e-3))
    monkeypatch.setattr(doctor.secrets, "randbits", lambda bits: SEED)
    assert doctor.doctor(quick=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Wrong: scan (torch), packed scan (torch), model."
    assert any(line.startswith("wrong    scan (torch)") for line in lines)
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda y: y + 1e-3, "y in float32 differs from float64 by"),
        (lambda y: y * math.nan, "y in float32 differs from float64 by nan"),
        (lambda y: y[:, :-1], "ValueError|RuntimeError|shape"),
    ],
)
def test_what_is_wrong_is_said(broken_scan, change, what):
    broken_scan(change)
    look = dict(operators.checks("cpu", SEED, quick=True))["scan (torch)"]
    (finding,) = doctor._safely("scan (torch)", look)
    assert finding.status == "wrong" and finding.remedy
    assert any(part in finding.found for part in what.split("|"))


def test_wrong_gradients_are_found(monkeypatch):
    def wrong(u, *rest):
        y, state = chunk_scan(u, *rest)
        # The value is right, and its gradient half too large.
        return y + (y - y.detach()) / 2, state

    monkeypatch.setitem(BACKENDS, "torch", Backend(wrong, step, lambda u: None))
    (finding,) = dict(operators.checks("cpu", SEED, quick=True))["packed scan (torch)"]()
    assert finding.status == "wrong" and finding.found.startswith("the gradient of u in float32")
    assert f"seed {SEED}" in finding.found


def test_an_exception_is_a_finding(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("the disk is on fire")

    for part, name in ((machine, "versions"), (machine, "facts"), (model, "check")):
        monkeypatch.setattr(part, name, fails)
    monkeypatch.setattr(operators, "checks", lambda *a, **o: [("step (torch)", fails)])
    report = doctor.examine(quick=True)
    assert report.wrong == ("versions", "known problems", "step (torch)", "model")
    assert named(report, "model")[0].found == "RuntimeError: the disk is on fire"


def test_a_backend_that_cannot_be_asked(monkeypatch):
    def fails(*arguments):
        raise ImportError("cannot import name 'knobs' from 'triton'")

    monkeypatch.setitem(BACKENDS, "triton", Backend(fails, fails, fails))
    monkeypatch.setattr(model, "check", lambda *a: [])
    assert doctor.examine(quick=True).wrong == ("backend", "operators")


def test_a_checkpoint_that_comes_back_changed(monkeypatch):
    from flash_frac.models import FracForCausalLM

    load = FracForCausalLM.from_pretrained

    def changed(folder):
        loaded = load(folder)
        loaded.lm_head.weight.data[5] += 1
        return loaded

    monkeypatch.setattr(FracForCausalLM, "from_pretrained", changed)
    found = model.check("cpu", SEED)
    assert [(x.name, x.status) for x in found] == [("model", "ok"), ("checkpoint", "wrong")]


@pytest.mark.parametrize(
    ("changes", "status", "what"),
    [
        ({}, "ok", "none"),
        ({"triton": None}, "ok", "none"),
        ({"triton": "3.4.0"}, "warning", "fla issue 640"),
        ({"triton": "3.7.0"}, "warning", "fla issue 640"),
        ({"triton": "3.7.0", "capability": (8, 0)}, "ok", "none"),
        ({"triton": "3.3.1"}, "ok", "none"),
        ({"torch_cuda": None, "capability": None}, "warning", "built for CPUs only"),
        ({"capability": None}, "warning", "sees no GPU"),
        ({"capability": None, "nvidia_smi": False}, "ok", "none"),
        ({"interpreted": True}, "warning", "bfloat16 is wrong"),
    ],
    ids=str,
)
def test_known_problems(changes, status, what):
    (finding,) = machine.known_problems(HEALTHY._replace(**changes))
    assert finding.status == status and what in finding.found
    assert bool(finding.remedy) == (status != "ok")


def test_the_interpreter_of_triton_3_4_with_numpy_2():
    here = HEALTHY._replace(interpreted=True, triton="3.4.0", capability=(8, 0))
    assert [x.status for x in machine.known_problems(here)] == ["warning", "wrong"]
    assert len(machine.known_problems(here._replace(numpy="1.26.4"))) == 1


def fake_versions(monkeypatch, **versions):
    real = machine.version_of
    fake = lambda package: versions.get(package.replace("-", "_"), real(package))  # noqa: E731
    monkeypatch.setattr(machine, "version_of", fake)


def test_versions_below_the_minimum(monkeypatch):
    fake_versions(monkeypatch, torch="2.7.1+cu126", transformers="4.57.0")
    (finding,) = machine.requirements()
    assert finding.status == "wrong"
    assert "found torch 2.7.1+cu126, but torch>=" in finding.found
    assert "transformers" in finding.found
    assert finding.remedy.startswith("pip install 'torch>=")


def test_missing_packages(monkeypatch):
    fake_versions(monkeypatch, scipy=None, matplotlib=None)
    (finding,) = machine.requirements()
    assert finding.status == "ok" and "theory (scipy)" in finding.found
    assert "theory" in finding.remedy and "plot" in finding.remedy
    fake_versions(monkeypatch, safetensors=None)
    assert machine.requirements()[0].status == "wrong"


def test_why_a_backend(monkeypatch):
    operators = ", ".join([*OPERATORS, "loss"])
    expected = f"backend='auto' runs torch for {operators}, because there is no CUDA device"
    assert machine.backend("cpu")[0].found == expected
    monkeypatch.setitem(BACKENDS, "triton", Backend(chunk_scan, step, lambda u: None))
    expected = f"backend='auto' runs triton for {operators}, because TRITON_INTERPRET is set"
    assert machine.backend("cpu")[0].found == expected


def test_narrow_terminals(monkeypatch):
    monkeypatch.setitem(os.environ, "COLUMNS", "70")
    text = str(doctor.Finding("name", "warning", "word " * 40, "do something"))
    assert max(len(line) for line in text.splitlines()) <= 70 and "-> do something" in text
