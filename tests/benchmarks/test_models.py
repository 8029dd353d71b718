"""The benchmarks of models, with a tiny one on the CPU."""

import json
import sys

import model
import pytest
import stream
import torch

from flash_frac.bench import models, parts, peers, table
from flash_frac.bench.parts import CPU_SIZES, build, our_subject, set_backend, step_times
from flash_frac.bench.rows import COLUMNS, read_rows
from flash_frac.bench.table import PAPER, bench, choose_config, choose_sizes, paper_table
from flash_frac.models import FracConfig

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes would be a GPU's")
TINY = {"model_type": "frac", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "frac_num_modes": 4}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script with a tiny model, and returns its rows; fla and mamba_ssm are missing."""
    for name in ("fla", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    config, out = tmp_path / "config.json", tmp_path / "out.csv"
    config.write_text(json.dumps(TINY))

    def run(script, *options):
        try:
            script.main(["--config", str(config), "--out", str(out), "--commit", "abc", *options])
        finally:
            run.rows = read_rows(out) if out.exists() else []
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
    # Two lengths of prefill, two batches of decoding in three ways of ours, one step; two peers.
    assert len(rows) == 2 + 4 * len(CPU_SIZES.prefill) + 5 * len(CPU_SIZES.decode_batches) + 3
    assert "left out: mamba2: ModuleNotFoundError" in capsys.readouterr().out


def test_parts_alone(run, capsys):
    (row,) = run(model, "--parts", "train", "--no-peers")
    assert (row["pass"], row["T"]) == ("train", "32") and row["error"]
    assert (row["H"], row["M"], row["D"]) == ("2", "4", "32")
    assert "left out" not in capsys.readouterr().out


def test_decoding_after_a_prompt_of_another_length(run):
    options = ["--prompt", "9", "--batches", "1"]
    rows = run(model, "--parts", "decode", "--no-peers", *options)
    assert [(row["pass"], row["B"], row["T"]) for row in rows] == [("decode", "1", "9")] * 3


def test_streams(run):
    rows = run(stream)
    assert [row["pass"] for row in rows] == ["save", "load", "stream"]
    # A file's time has nothing to do with how many tokens were fed.
    assert_complete(rows, lambda row: row["pass"] == "stream")


def test_our_own_failure_is_seen_but_not_the_end(run, monkeypatch):
    def broken(subject, sizes, failures):
        models.attempt(subject.label("eager"), lambda: 1 / 0, failures)
        return []

    monkeypatch.setitem(models.PARTS, "prefill", broken)
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
    with pytest.raises(SystemExit, match=r"logits on recurrent are wrong by .*: no timing"):
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
    ours = FracConfig.from_json_file(model.CONFIG)
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
    # Ours in three ways and a peer; the paper's models are larger, and ran on a GPU.
    assert len(lines) == 2 + 4 and len(left_out) == 1
    kept = json.loads(path.read_text())
    assert all(f" {row['tokens_per_s']:,.0f} |" in "\n".join(lines) for row in kept["rows"])
    assert kept["left_out"] == left_out and kept["made_with"]["torch"]


def test_columns_of_the_table():
    row = {"implementation": "flash_frac", "pass": "prefill", "B": 1, "T": 4096}
    rows = [row | {"tokens_per_s": 1234.5}, row | {"pass": "decode", "B": 64, "tokens_per_s": 9}]
    lines = paper_table(rows)
    assert lines[0].endswith("| decode | train@4K | decode x 64 |")
    assert lines[2] == "| flash_frac |  | 1,234 |  |  |  | 9 |"
    assert len(lines) == 3 + len(PAPER)
    assert lines[-1].startswith("| *FRAC, paper* | 16,213 | 49,946 | 77,490 | 33 | 241,598 |")
    assert paper_table(rows, paper=False)[0] == "| tokens/s | prefill@4K | decode x 64 |"


def test_the_paper_stands_beside_its_own_size_on_a_gpu(monkeypatch):
    whole = FracConfig.from_json_file(model.CONFIG)
    assert not table._is_papers(whole)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert table._is_papers(whole) and not table._is_papers(FracConfig(**TINY))


def test_what_is_not_known_is_named():
    config = FracConfig(**TINY)
    with pytest.raises(ValueError, match="parts must be of prefill, decode, train, got speed"):
        bench(config, parts=["speed"])
    with pytest.raises(ValueError, match=r"peers must be of qwen3, .*, got gpt"):
        bench(config, peers=["gpt"])
    assert choose_sizes("64,128").prefill == (64, 128)
    with pytest.raises(ValueError, match="lengths must be positive numbers"):
        choose_sizes("1K")


def test_the_default_is_the_model_of_the_recipe(monkeypatch):
    with pytest.raises(ValueError, match="config must be given where there is no GPU"):
        choose_config(None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_config(None).to_dict() == FracConfig.from_json_file(model.CONFIG).to_dict()
