"""The benchmark of the model, with a tiny one on the CPU."""

import csv
import json
import sys

import model
import pytest
import torch

from flash_frac.bench import models, peers
from flash_frac.bench.parts import CPU_SIZES, our_subject, set_backend, step_times
from flash_frac.bench.table import PAPER, bench, choose_config, choose_sizes, paper_table
from flash_frac.models import FracConfig
from flash_frac.recipes import find_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes would be a GPU's")
TINY = {
    "model_type": "frac",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "frac_num_modes": 4,
}


@pytest.fixture
def config(tmp_path, monkeypatch):
    for name in ("fla", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def run(config, *options):
    out = config.with_name("out.csv")
    model.main(["--config", str(config), "--out", str(out), "--commit", "abc", *options])
    with out.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_parts_with_peers(config, capsys):
    rows = run(config)
    keys = [(row["implementation"].split(" (")[-1].rstrip(")"), row["pass"]) for row in rows]
    for key in (
        *(("torch", passed) for passed in ("forward", "forward+backward")),
        *(("eager", "prefill"), ("Generator", "prefill"), ("sdpa", "prefill"), ("sdpa", "train")),
        *(("generate", "decode"), ("Generator", "decode"), ("sdpa", "decode")),
    ):
        assert key in keys, key
    # Two lengths of prefill, two batches of decoding, one step; ours in two ways, two peers.
    assert len(rows) == 2 + 4 * len(CPU_SIZES.prefill) + 4 * len(CPU_SIZES.decode_batches) + 3
    assert all(float(row["ms_p50"]) > 0 and float(row["tokens_per_s"]) > 0 for row in rows)
    for row in (row for row in rows if row["pass"] == "decode"):
        rate = 1e3 * int(row["B"]) / float(row["ms_p50"])
        assert float(row["tokens_per_s"]) == pytest.approx(rate, rel=2e-3)
    out = capsys.readouterr().out
    assert "left out: mamba2: ModuleNotFoundError" in out and "Qwen3: 14.4K parameters" in out


def test_parts_alone(config, capsys):
    rows = run(config, "--parts", "train", "--no-peers")
    assert [(row["implementation"], row["pass"]) for row in rows] == [("flash_frac 18.1K", "train")]
    assert rows[0]["error"] and rows[0]["T"] == "32" and rows[0]["commit"] == "abc"
    assert "left out" not in capsys.readouterr().out


def test_our_own_failure_is_seen_but_not_the_end(config, monkeypatch):
    def broken(subject, sizes, failures):
        models.attempt(subject.label("eager"), lambda: 1 / 0, failures)
        return []

    monkeypatch.setitem(model.PARTS, "prefill", broken)
    with pytest.raises(SystemExit, match=r"flash_frac 18\.1K \(eager\): ZeroDivisionError"):
        run(config, "--parts", "prefill", "train", "--no-peers")
    assert config.with_name("out.csv").read_text().count(",train,") == 1


def test_a_cpu_wants_a_tiny_model(capsys):
    with pytest.raises(SystemExit):
        model.main(["--parts", "train"])
    assert "--config" in capsys.readouterr().err


@pytest.mark.parametrize("factor", [1.2, torch.nan])
def test_a_wrong_model_is_not_timed(monkeypatch, factor):
    """A backend whose final norm is off, on "recurrent" alone."""

    def spoil(built, backend):
        built.model.norm.weight.data.fill_(factor if backend == "recurrent" else 1)
        return set_backend(built, backend)

    assert models.check("cpu", "torch") < 0.1
    monkeypatch.setattr(models, "set_backend", spoil)
    with pytest.raises(SystemExit, match=r"logits on recurrent are wrong by .*: no timing"):
        models.check("cpu", "recurrent")


def test_every_layer_takes_the_backend():
    built = set_backend(peers.build(FracConfig(**TINY), torch.float32, "cpu"), "recurrent")
    assert all(block.mixer.backend == "recurrent" for block in built.model.layers)


def test_decoding_that_stops_early_is_refused():
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"gave \(1, 4\), expected \(1, 5\)"):
        step_times(lambda ids, max_new_tokens: ids, ids, 3)


def test_generate_does_not_stop_at_an_end_token():
    """A head of zeros says token 0 at once, which its configuration calls the end."""
    settings = TINY | {"tie_word_embeddings": False, "eos_token_id": 0, "pad_token_id": None}
    built = peers.build(FracConfig(**settings), torch.float32, "cpu")
    built.lm_head.weight.data.zero_()
    ids = our_subject(built, None).tokens(2, 5)
    assert built.generate(ids, max_new_tokens=7)[:, 5:].tolist() == [[0] * 7] * 2


def test_the_transformer_is_as_large_as_ours():
    """Backbones: embeddings are left out, which do not take part in a prefill."""
    ours = FracConfig.from_json_file(model.CONFIG)
    peer = peers.qwen3(ours)
    sizes = []
    for config in (ours, peer.config):
        built = peers.build(config, torch.bfloat16, "meta")
        embedding = built.get_input_embeddings().weight.numel()
        sizes.append(sum(p.numel() for p in built.parameters()) - embedding)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
    assert peer.config.num_hidden_layers == 26 and peer.shape == {"H": 16, "M": None, "D": 128}


def test_bench_prints_the_layout_of_the_paper(tmp_path, capsys):
    path = tmp_path / "deep" / "rows.json"
    lines, left_out = bench(
        FracConfig(**TINY), peers=["qwen3", "mamba2"], sizes=CPU_SIZES, out=path
    )
    ours = next(line for line in lines if line.startswith("| flash_frac 18.1K (Generator)"))
    assert ours.count("|") == lines[0].count("|") and "prefill@16" in lines[0]
    assert any("Qwen3" in line for line in lines) and len(left_out) == 1
    assert lines[-1].startswith("| *FRAC, paper* | 16,213 | 49,946 | 77,490 | 33 | 241,598 |")
    assert len(lines) == 2 + 3 + len(PAPER)
    kept = json.loads(path.read_text())
    assert len(kept["rows"]) == 14 and kept["left_out"] == left_out and kept["made_with"]["torch"]


def test_columns_of_the_table():
    row = {"implementation": "flash_frac", "pass": "prefill", "B": 1, "T": 4096}
    rows = [row | {"tokens_per_s": 1234.5}, row | {"pass": "decode", "B": 64, "tokens_per_s": 9}]
    lines = paper_table(rows)
    assert lines[0].endswith("| decode | train@4K | decode x 64 |")
    assert lines[2] == "| flash_frac |  | 1,234 |  |  |  | 9 |"


def test_bench_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="parts must be of prefill, decode, train, got speed"):
        bench(FracConfig(**TINY), parts=["speed"])
    with pytest.raises(ValueError, match=r"peers must be of qwen3, .*, got gpt"):
        bench(FracConfig(**TINY), peers=["gpt"])


def test_a_configuration_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    FracConfig(**TINY).save_pretrained(tmp_path / "mine")
    assert choose_config("mine").hidden_size == TINY["hidden_size"]
    assert (
        choose_config("frac-30m").to_dict() == choose_config(str(find_config("frac-30m"))).to_dict()
    )
    (tmp_path / "empty").mkdir()
    for name in ("empty", "frac-30"):
        with pytest.raises(ValueError, match=rf"config {name} was not found: .*frac-30m"):
            choose_config(name)


def test_the_default_needs_a_gpu(monkeypatch):
    with pytest.raises(ValueError, match=r"config must be given where there is no GPU.*frac-30m"):
        choose_config(None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert choose_config(None).to_dict() == FracConfig.from_json_file(model.CONFIG).to_dict()


def test_lengths_are_numbers():
    assert choose_sizes("64,128").prefill == (64, 128)
    with pytest.raises(ValueError, match="lengths must be positive numbers"):
        choose_sizes("1K")
