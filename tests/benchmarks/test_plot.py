"""The figures, from rows made up here."""

import plot
import pytest

from flash_frac.bench.rows import append_rows

SHAPES = ((1, 16384), (8, 4096))
PEERS = ("fla 0.6.0 chunk_gla K16 V256", "torch 2.11.0+cu130 causal SDPA D128")


def row(script, implementation, passed, batch, time, ms, commit="new"):
    return {
        "implementation": implementation,
        "pass": passed,
        **{"B": batch, "T": time, "H": 16, "M": 16, "D": 256, "dtype": "bfloat16"},
        **{"ms_p20": ms, "ms_p50": ms, "ms_p80": ms, "tokens_per_s": 1e3 * batch * time / ms},
        **{"command": f"python benchmarks/{script}", "commit": commit, "machine": "NVIDIA X1"},
        **{"torch": "2.11.0", "triton": "3.6.0"},
    }


def op_rows(commit, ms):
    for batch, time in SHAPES:
        for passed, factor in (("forward", 1), ("forward+backward", 3)):
            ours = row("ops.py", "flash_frac triton", passed, batch, time, factor * ms, commit)
            torch = row("ops.py", "flash_frac torch", passed, batch, time, 987, commit)
            yield from (ours, torch)


def model_rows():
    for name in ("flash_frac 1.39B (Generator)", "transformers 5.17.0 Qwen3 1.37B (sdpa)"):
        for time in (1024, 4096):
            yield row("model.py", name, "prefill", 1, time, 8.0)
        for batch in (1, 64):
            yield row("model.py", name, "decode", batch, 1024, 1024.0)
        yield row("model.py", name, "train", 8, 4096, 500.0)


@pytest.fixture
def draw(tmp_path, capsys):
    def draw(rows):
        path, out = tmp_path / "x1.csv", tmp_path / "figures"
        append_rows(rows, path)
        plot.main([str(path), "--out", str(out)])
        return {figure.stem: figure.read_text() for figure in out.iterdir()}

    return draw


def test_both_figures(draw):
    peers = [row("ops.py", name, "forward", *SHAPES[0], 0.875, "old") for name in PEERS]
    figures = draw([*op_rows("old", 0.5), *peers, *op_rows("new", 0.25), *model_rows()])
    op, model = figures["op_speed"], figures["model_speed"]
    # Ours of the newest commit, the peers' from whenever they were measured, and not our torch.
    assert "0.25 ms" in op and "0.75 ms" in op and "0.5 ms" not in op and "987 ms" not in op
    assert all(name in op for name in PEERS) and "NVIDIA X1" in op and "flash_frac new" in op
    for text in ("prefill, batch 1", "decode, batch 64", "train, batch 8"):
        assert text in model, text
    assert all(f">{plot.short(row['tokens_per_s'])}<" in model for row in model_rows())


def test_a_peer_is_drawn_in_its_newest_version(draw):
    peers = [
        row("ops.py", f"fla 0.{n}.0 chunk_gla K16 V256", "forward", 1, 16384, n) for n in (5, 6)
    ]
    op = draw([*op_rows("new", 0.25), *peers])["op_speed"]
    assert "fla 0.6.0" in op and "fla 0.5.0" not in op


def test_a_figure_that_compares_nothing_is_not_drawn(draw, capsys):
    assert set(draw([*model_rows(), *op_rows("new", 0.25)])) == {"model_speed"}
    assert "op_speed.svg not drawn" in capsys.readouterr().out


def test_the_same_rows_give_the_same_file(draw):
    rows = [*op_rows("new", 0.25), *model_rows()]
    assert draw(rows) == draw(rows)


def test_numbers_are_short():
    assert [plot.short(x) for x in (9, 23.84, 1618, 2e6)] == ["9", "23.8", "1.62K", "2M"]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fla 0.6.0 Mamba2 1.37B (mamba_ssm 2.3.2.post1)", "fla Mamba2 (mamba_ssm)"),
        ("torch 2.11.0+cu130 causal SDPA D128", "torch causal SDPA D128"),
        ("flash_frac triton", "flash_frac triton"),
    ],
)
def test_families_have_no_versions(name, family):
    assert plot.family(name) == family
