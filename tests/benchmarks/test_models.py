"""The model benchmarks, with a tiny model on the CPU."""

import json
import sys

import model
import pytest
import stream
import torch

from flash_frac.bench import models, parts, peers, plans, table
from flash_frac.bench.models import PARTS
from flash_frac.bench.parts import CPU_SIZES, describe_steps, step_times
from flash_frac.bench.profiling import (
    ALL,
    MOST_KERNELS,
    NONE,
    PROFILE_COLUMNS,
    Kernel,
    summarise,
)
from flash_frac.bench.rows import COLUMNS, read_rows
from flash_frac.bench.subjects import build, our_subject, set_backend
from flash_frac.bench.table import (
    PAPER,
    bench,
    choose_config,
    choose_modes,
    choose_sizes,
    model_of,
    paper_table,
)
from flash_frac.layers import mixer
from flash_frac.layers.plain import stored
from flash_frac.models import FracConfig
from flash_frac.ops.decode.plan import DEFAULT, PLANS, step_plan
from flash_frac.recipes import find_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes would be a GPU's")
# The model that is timed unless another is given.
PAPERS = find_config("frac-1.3b") / "config.json"
TINY = {"model_type": "frac", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "frac_num_modes": 4}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script with a tiny model, and returns its rows; fla and mamba_ssm are missing."""
    for name in ("fla", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    config, out = tmp_path / "config.json", tmp_path / "out.csv"
    config.write_text(json.dumps(TINY))

    def run(script, *options, columns=COLUMNS):
        try:
            script.main(["--config", str(config), "--out", str(out), "--commit", "abc", *options])
        finally:
            run.rows = read_rows(out, columns) if out.exists() else []
        return run.rows

    return run


def assert_complete(rows, tokens):
    """All columns, and tokens/s as the time says; `tokens(row)`: those of a call, 0 if none."""
    for row in rows:
        assert tuple(row) == COLUMNS and row["commit"] == "abc" and row["torch"]
        assert 0 < float(row["ms_p20"]) <= float(row["ms_p50"]) <= float(row["ms_p80"])
        rate = 1e3 * tokens(row) / float(row["ms_p50"])
        assert float(row["tokens_per_s"] or 0) == pytest.approx(rate, rel=2e-3)
        assert row["H"] and row["D"] and row["dtype"]


def test_all_parts_with_peers(run, capsys):
    rows = run(model)
    assert_complete(rows, lambda row: int(row["B"]) * (row["pass"] == "decode" or int(row["T"])))
    decoding = ["generate", "transformers' loop", "Generator"]
    ways = {"prefill": ["eager", "Generator"], "decode": decoding, "train": []}
    for passed, expected in ways.items():
        found = [row["implementation"] for row in rows if row["pass"] == passed]
        for name in ("flash_frac", "Qwen3", "Mamba2", *(f"({way})" for way in expected)):
            assert any(name in label for label in found), (name, passed)
    # Two lengths of prefill and of forward, two batches of decoding in three ways of ours, one
    # step; two peers; two lengths of growth.
    num_read = 4 * len(CPU_SIZES.prefill) + 3 * len(CPU_SIZES.forward)
    assert len(rows) == 2 + num_read + 5 * len(CPU_SIZES.decode_batches) + 3 + 2
    assert {row["mode"] for row in rows} == {"eager"}
    assert all(row["state_bytes"] for row in rows if row["pass"] in ("prefill", "decode"))
    out = capsys.readouterr().out
    for name in ("gated_deltanet", "mamba2", "mamba3", "mamba3_d64", "mamba3_mimo"):
        assert f"left out: {name}: ModuleNotFoundError" in out
        assert f"| {name} could not be run: ModuleNotFoundError: " in out


def test_parts_alone(run, capsys):
    (row,) = run(model, "--parts", "train", "--no-peers")
    assert (row["pass"], row["T"]) == ("train", "32") and row["error"]
    assert (row["H"], row["M"], row["D"]) == ("2", "4", "32")
    assert "left out" not in capsys.readouterr().out


def test_training_by_the_policies_of_checkpointing(run):
    rows = run(model, "--parts", "train", "--no-peers", "--policies", "all", "cheap")
    ways = [row["implementation"].partition(" (")[2] for row in rows]
    assert ways == ["", "recomputing all)", "recomputing cheap)"]
    assert {row["pass"] for row in rows} == {"train"}


def test_decoding_after_a_prompt_of_another_length(run):
    options = ["--prompt", "9", "--batches", "1"]
    rows = run(model, "--parts", "decode", "--no-peers", *options)
    assert [(row["pass"], row["B"], row["T"]) for row in rows] == [("decode", "1", "9")] * 3


def test_prefill_and_forward_of_given_lengths(run):
    rows = run(model, "--parts", "prefill", "forward", "--no-peers", "--lengths", "7", "9")
    found = {passed: [x["T"] for x in rows if x["pass"] == passed] for passed in PARTS}
    assert (found["prefill"], found["forward"]) == (["7", "7", "9", "9"], ["7", "9"])
    assert {row["mode"] for row in rows} == {"eager"}


def test_one_mode_only(run):
    """On a CPU nothing is recorded."""
    options = ["--parts", "prefill", "decode", "--batches", "1", "--no-peers"]
    assert len(run(model, *options, "--only", "eager")) == 2 * len(CPU_SIZES.prefill) + 3
    before = len(run.rows)
    assert len(run(model, *options, "--only", "graph")) == before


def test_a_cliff_is_named():
    def row(way, batch, ms):
        return {"implementation": f"x ({way})", "B": batch, "ms_p50": ms}

    steps = {1: 1.0, 2: 1.5, 4: 2.4, 16: 9.0}
    lines = describe_steps([row("a", *x) for x in steps.items()] + [row("b", 1, 1), row("b", 2, 1)])
    assert lines == [
        "x (a): a step of 2B takes at most 1.60 times a step of B (2 to 4); "
        "CLIFF from 2 to 4: 1.60",
        "x (b): a step of 2B takes at most 1.00 times a step of B (1 to 2)",
    ]
    assert describe_steps([row("a", 1, 1.0), row("a", 4, 9.0)]) == []


def test_decoding_that_is_wrong_is_not_timed(run, monkeypatch):
    """A step that is wrong where a parallel pass is right."""
    step = mixer.frac_step

    def wrong(*arguments, **options):
        y, state = step(*arguments, **options)
        return 1.1 * y, state

    monkeypatch.setattr(mixer, "frac_step", wrong)
    with pytest.raises(
        SystemExit, match=r"decoding at batch 1 on torch are wrong by .*: not timed"
    ):
        run(model, "--parts", "train", "--no-peers")
    assert run.rows == []


def test_quantised_weights_that_are_read_wrong_are_not_timed(run, monkeypatch):
    def halved(weight):
        found = stored(weight)
        return found and found._replace(scale=None if found.scale is None else found.scale / 2)

    monkeypatch.setattr(models, "stored", halved)
    options = ["--parts", "decode", "--batches", "1", "--no-peers", "--quantize", "int8"]
    with pytest.raises(SystemExit, match=r"flash_frac int8: ValueError: .*int8 .* not timed"):
        run(model, *options)
    assert len(run.rows) == 3


def test_profile(run, capsys):
    """On a CPU, operators in place of kernels."""
    options = ["--profile", "--batches", "1", "--lengths", "7"]
    rows = run(model, *options, columns=PROFILE_COLUMNS)
    assert [(row["pass"], row["B"], row["T"]) for row in rows if row["kernel"] == ALL] == [
        ("prefill", "1", "7"),
        ("forward", "1", "7"),
        ("decode", "1", "16"),
        ("train", "2", "32"),
    ]
    assert any(row["kernel"] == "aten::matmul" for row in rows)
    assert "% " in capsys.readouterr().out


def test_the_time_of_a_call_is_split_over_kernels():
    """Two calls, of a kernel, another that runs half beside it, and a gap."""
    runs = [
        Kernel(name, at + start, at + end)
        for at in (100, 110)
        for name, start, end in (("a", 0, 4), ("b", 2, 6), ("a", 8, 10))
    ]
    rows = {row.pop("kernel"): tuple(row.values()) for row in summarise(runs[::-1], 2)}
    assert rows["a"] == (2, 6, 60) and rows["b"] == (1, 4, 40)
    assert rows[ALL] == (1, 10, 100) and rows[NONE] == (0, 2, 20)
    many = [Kernel(f"k{n}", 10 * n, 11 * n) for n in range(1, 30)]
    found = [row["kernel"] for row in summarise(many, 1)]
    assert found[1] == "k29" and len(found) == MOST_KERNELS + 3
    with pytest.raises(ValueError, match="saw no kernels"):
        summarise([], 1)


def test_quantised_weights_beside_ours(run):
    """All but training, which they have none of, and growth, which is the model's."""
    kinds = ("int8", "fp8")
    parts = ["decode", "train", "growth"]
    rows = run(model, "--no-peers", "--parts", *parts, "--quantize", *kinds, "--modes", "8")
    found = [(row["implementation"].split(" (")[0].split()[1:-1], row["pass"]) for row in rows]
    num = 3 * len(CPU_SIZES.decode_batches)
    assert [kind for kind, passed in found if passed == "train"] == [[], ["M", "8"]]
    assert [kind for kind, passed in found if passed == "growth"] == [[]] * len(CPU_SIZES.growth)
    for kind in ([], ["int8"], ["fp8"], ["M", "8"]):
        assert found.count((kind, "decode")) == num, kind
    with pytest.raises(SystemExit):
        run(model, "--quantize", "int3")


def test_plans_of_steps(run, monkeypatch, capsys):
    """Each is in force while it is checked and recorded, and one that is wrong is not timed."""
    found = []

    def check(device, backend, dtype):
        found.append(step_plan(torch.device(device)))
        if len(found) == 2:
            raise ValueError("decoding is wrong by 1.0e-01: not timed")
        return 1e-7

    monkeypatch.setattr(plans, "check_inference", check)
    with pytest.raises(SystemExit, match="our own code failed"):
        run(model, "--parts", "plans", "--batches", "1", "2")
    names = [*plans.plans_to_try()]
    assert found == [*plans.plans_to_try().values()] and found[0] == DEFAULT
    assert_complete(run.rows, lambda row: int(row["B"]))
    timed = [name for name in names if name != names[1]]
    ours = [row["implementation"].partition(" (")[2].rstrip(")") for row in run.rows]
    assert ours == 2 * timed and {row["pass"] for row in run.rows} == {"step"}
    assert f"({names[1]}): ValueError: decoding is wrong" in capsys.readouterr().out


def test_a_plan_is_in_force_for_a_while():
    first, second = [*plans.plans_to_try().values()][1:3]
    device = torch.device("cpu")
    with plans.using("cpu", first):
        with plans.using("cpu", second):
            assert step_plan(device) == second
        assert step_plan(device) == first
    assert step_plan(device) == DEFAULT and device.type not in PLANS


def test_streams(run):
    rows = run(stream)
    assert [row["pass"] for row in rows] == ["save", "load", "stream"]
    # A file's time has nothing to do with how many tokens were fed.
    assert_complete(rows, lambda row: row["pass"] == "stream")


def test_our_own_failure_is_seen_but_not_the_end(run, monkeypatch):
    def broken(subject, sizes, failures):
        models.attempt(subject.label("eager"), lambda: 1 / 0, failures)
        return []

    monkeypatch.setitem(plans.MEASURED, "prefill", broken)
    with pytest.raises(SystemExit, match=r"flash_frac .* \(eager\): ZeroDivisionError"):
        run(model, "--parts", "prefill", "train", "--no-peers")
    assert [row["pass"] for row in run.rows] == ["train"]


def test_a_cpu_wants_a_tiny_model(capsys):
    with pytest.raises(SystemExit):
        model.main(["--parts", "train"])
    assert "--config" in capsys.readouterr().err


@pytest.mark.parametrize("script", [model, stream])
@pytest.mark.parametrize("factor", [1.2, torch.nan])
def test_a_wrong_model_is_not_timed(run, monkeypatch, capsys, script, factor):
    """A backend whose final norm is off, on "recurrent" alone."""

    def spoil(built, backend):
        built.model.norm.weight.data.fill_(factor if backend == "recurrent" else 1)
        return set_backend(built, backend)

    monkeypatch.setattr(models, "set_backend", spoil)
    monkeypatch.setattr(models, "machine", lambda: ("cpu", "recurrent", torch.float32))
    with pytest.raises(SystemExit, match=r"logits on recurrent are wrong by .*: not timed"):
        run(script)
    assert run.rows == [] and "tokens/s" not in capsys.readouterr().out


def test_every_layer_takes_the_backend():
    built = set_backend(build(FracConfig(**TINY), torch.float32, "cpu"), "recurrent")
    assert all(block.mixer.backend == "recurrent" for block in built.model.layers)


def test_decoding_that_stops_early_is_refused():
    class Short:
        def generate(self, **_):
            return iter(range(3))

    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"gave \(1, 4\), expected \(1, 5\)"):
        step_times(lambda ids, max_new_tokens: ids, ids, 3)
    with pytest.raises(AssertionError, match="3 of 5"):
        parts.stream_step_times(Short(), 5)


def test_generate_does_not_stop_at_an_end_token():
    """A head of zeros says token 0 at once, which its configuration calls the end."""
    settings = TINY | {"tie_word_embeddings": False, "eos_token_id": 0, "pad_token_id": None}
    built = build(FracConfig(**settings), torch.float32, "cpu")
    built.lm_head.weight.data.zero_()
    ids = our_subject(built, None).tokens(2, 5)
    assert built.generate(ids, max_new_tokens=7)[:, 5:].tolist() == [[0] * 7] * 2


def test_the_transformer_is_as_large_as_ours():
    """Backbones: embeddings are left out, which do not take part in a prefill."""
    ours = FracConfig.from_json_file(PAPERS)
    peer = peers.qwen3(ours)
    sizes = []
    for config in (ours, peer.config):
        built = build(config, torch.bfloat16, "meta")
        embedding = built.get_input_embeddings().weight.numel()
        sizes.append(sum(p.numel() for p in built.parameters()) - embedding)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


def test_bench_prints_the_layout_of_the_paper(tmp_path):
    path = tmp_path / "deep" / "rows.json"
    config = FracConfig(**TINY)
    lines, left_out = bench(config, peers=["qwen3", "mamba2"], sizes=CPU_SIZES, out=path)
    assert len({line.count("|") for line in lines}) == 1 and "prefill@16" in lines[0]
    # Ours in four lines, a peer, and one that is missing; the paper's models are larger, and ran
    # on a GPU.
    assert len(lines) == 2 + 4 + 1 + 1 and len(left_out) == 1
    assert "mamba2 could not be run: ModuleNotFoundError" in lines[-1]
    kept = json.loads(path.read_text())
    assert all(f" {row['tokens_per_s']:,.0f} |" in "\n".join(lines) for row in kept["rows"])
    assert kept["left_out"] == left_out and kept["made_with"]["torch"]


def test_columns_of_the_table():
    row = {"implementation": "flash_frac 1.39B (eager)", "pass": "prefill", "B": 1, "T": 4096}
    row |= {"mode": "eager", "state_bytes": None, "tokens_per_s": 1234.5}
    many = {"pass": "decode", "B": 64, "tokens_per_s": 9, "state_bytes": 3 * 2**19}
    rows = [row, row | many | {"implementation": "flash_frac 1.39B (transformers' loop)"}]
    lines = paper_table(rows)
    assert lines[0].endswith("| decode | train@4K | decode x 64 |")
    assert lines[2] == "| flash_frac 1.39B | eager | 1.5 |  | 1,234 |  |  |  | 9 |"
    assert len(lines) == 3 + len(PAPER)
    assert lines[-1].startswith("| *FRAC, paper* |  |  | 16,213 | 49,946 | 77,490 | 33 | 241,598 |")
    columns = "| tokens/s | mode | state, MiB | prefill@4K | decode x 64 |"
    assert paper_table(rows, paper=False)[0] == columns


def test_modes_and_ways_have_lines_of_their_own():
    def row(way, mode, passed, rate):
        about = {"implementation": f"flash_frac 1.39B ({way})", "mode": mode, "pass": passed}
        return about | {"B": 1, "T": 1024, "tokens_per_s": rate, "state_bytes": 2**20}

    rows = [
        row("eager", "eager", "prefill", 1),
        row("Generator", "graph", "prefill", 2),
        row("Generator", "graph", "decode", 3),
        row("generate", "graph", "decode", 4),
        row("transformers' loop", "eager", "decode", 5),
        row("Generator", "eager", "growth", 6),
    ]
    lines = paper_table(rows, ["a peer: Error: no | kernel"], paper=False)
    assert lines[2:] == [
        "| flash_frac 1.39B | eager | 1.0 | 1 | 5 |",
        "| flash_frac 1.39B | graph | 1.0 | 2 | 3 |",
        "| flash_frac 1.39B (generate) | graph | 1.0 |  | 4 |",
        "| a peer could not be run: Error: no \\| kernel | | | | |",
    ]


def test_the_model_of_a_row():
    assert model_of("x Qwen3 1.37B (sdpa, graph)") == "x Qwen3 1.37B (sdpa)"
    assert model_of("flash_frac 1.39B (Generator)") == model_of("flash_frac 1.39B")


def test_the_paper_stands_beside_its_own_size_on_a_gpu(monkeypatch):
    whole = FracConfig.from_json_file(PAPERS)
    assert not table.is_papers(whole)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert table.is_papers(whole) and not table.is_papers(FracConfig(**TINY))


def test_what_is_not_known_is_named():
    config = FracConfig(**TINY)
    with pytest.raises(ValueError, match=r"parts must be among prefill, forward, decode, .*, got"):
        bench(config, parts=["speed"])
    with pytest.raises(ValueError, match=r"peers must be among qwen3, .*, got gpt"):
        bench(config, peers=["gpt"])
    assert choose_sizes("64,128").prefill == (64, 128)
    with pytest.raises(ValueError, match="lengths must be positive numbers"):
        choose_sizes("1K")
    assert choose_modes("") == () and choose_modes("32,64") == (32, 64)
    with pytest.raises(ValueError, match="modes must be positive numbers such as 32,64"):
        choose_modes("all")


def test_the_default_is_the_model_of_the_recipe(monkeypatch):
    with pytest.raises(ValueError, match="config must be given if there is no GPU"):
        choose_config(None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_config(None).to_dict() == FracConfig.from_json_file(PAPERS).to_dict()
