"""The benchmark figures, from made-up rows."""

import plot
import pytest

from flash_frac.bench.rows import append_rows

SHAPES = ((1, 16384), (8, 4096))
PEERS = ("fla 0.6.0 chunk_gla K16 V256", "torch 2.11.0+cu130 causal SDPA D128")


def row(script, implementation, passed, batch, time, ms, commit="new", **more):
    return more | {
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


def decode_row(name, mode, ms, **more):
    held = {"mode": mode, "state_bytes": 3 * 2**20}
    return row("model.py", name, "decode", 1, 1024, ms, **held | more)


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
    # Where a commit has peers, ours of that commit; elsewhere of the newest; and not our torch.
    assert "0.5 ms" in op and "0.25 ms" in op and "0.75 ms" in op and "987 ms" not in op
    assert (
        all(name in op for name in PEERS) and "NVIDIA X1" in op and "flash_frac old and new" in op
    )
    texts = ("prefill, batch 1", "decode, batch 64", "train, batch 8", "CUDA graphs", "eager")
    for text in texts:
        assert text in model, text
    assert "no row" in model and "state not recorded" in model
    assert all(f">{plot.short(row['tokens_per_s'])}<" in model for row in model_rows())


def test_a_peer_is_drawn_in_its_newest_version(draw):
    peers = [
        row("ops.py", f"fla 0.{n}.0 chunk_gla K16 V256", "forward", 1, 16384, n) for n in (5, 6)
    ]
    op = draw([*op_rows("new", 0.25), *peers])["op_speed"]
    assert "fla 0.6.0" in op and "fla 0.5.0" not in op


def test_graphs_are_drawn_beside_graphs_with_the_bytes_of_states():
    rows = [
        decode_row("flash_frac 1.39B (Generator)", "graph", 1.0),
        decode_row("flash_frac 1.39B (generate)", "graph", 1.5),
        decode_row("flash_frac 1.39B (transformers' loop)", "eager", 20.0),
        decode_row("flash_frac M 32 1.46B (Generator)", "graph", 1.1),
        decode_row("x 1.0 Qwen3 1.37B (sdpa, generate)", "eager", 22.0),
        decode_row("x 1.0 Qwen3 1.37B (sdpa, graph)", "graph", 5.0),
        decode_row("transformers 5.17.0 Mamba2 1.4B (graph)", "graph", 9.0),
        decode_row("fla 0.6.0 Mamba2 1.4B (mamba_ssm 2.3, graph)", "graph", 3.0),
    ]
    chosen = [(plot.mode_of(x), x["ms_p50"]) for x in plot.model_rows(rows, "decode")]
    assert sorted(chosen) == [
        ("eager", 20),
        ("eager", 22),
        ("graph", 1),
        ("graph", 3),
        ("graph", 5),
    ]
    name = plot.named("x Qwen3 (sdpa)", rows)
    assert name == "x 1.0 Qwen3 1.37B (sdpa): state 3 MiB after 1,024 tokens"


def test_rows_of_one_commit_are_compared():
    """The newest with both sides, for each batch; another run of only ours hides nothing."""
    ours, peer = "flash_frac 1.39B (Generator)", "x 1.0 Qwen3 1.37B (graph)"

    def decoded(name, batch, ms, commit):
        return decode_row(name, "graph", ms, commit=commit) | {"B": batch}

    rows = [decoded(name, batch, 1.0, "a") for name in (ours, peer) for batch in (1, 8)]
    rows += [decoded(name, 1, 2.0, "b") for name in (peer, ours)]
    rows += [decoded(ours, batch, 3.0, "c") for batch in (1, 8, 64)]
    chosen = {(x["B"], x["ms_p50"]) for x in plot.model_rows(rows, "decode")}
    assert chosen == {(1, 2.0), (8, 1.0), (64, 3.0)}
    # Without a common commit, each side's newest.
    rows = [decoded(peer, 1, 1.0, "a"), decoded(ours, 1, 2.0, "b"), decoded(ours, 1, 3.0, "c")]
    assert [x["ms_p50"] for x in plot.model_rows(rows, "decode")] == [3.0, 1.0]


def test_recomputation_is_no_model_of_its_own():
    rows = [
        row("model.py", f"flash_frac 1.39B{way}", "train", 8, 4096, 600.0, mode="eager")
        for way in ("", " (recomputing all)", " (recomputing cheap)")
    ]
    assert [x["implementation"] for x in plot.model_rows(rows, "train")] == ["flash_frac 1.39B"]


def test_many_batches_are_one_panel(draw):
    rows = [
        decode_row(name, "graph", 1.0 + batch / 50) | {"B": batch, "tokens_per_s": 1e3 * batch}
        for name in ("flash_frac 1.39B (Generator)", "x 1.0 Qwen3 1.37B (sdpa, graph)")
        for batch in (1, 2, 4, 8, 16, 32, 64, 256)
    ]
    model = draw(rows)["model_speed"]
    assert "decode, after 1,024 tokens" in model and "decode, batch" not in model
    assert all(f">{text}<" in model for text in ("1K", "10K", "256K", "32", "sequences"))


def test_older_rows_have_the_mode_they_were_run_in():
    def mode(way, passed, time):
        return plot.mode_of(row("model.py", f"flash_frac 1B ({way})", passed, 1, time, 1, mode=""))

    assert mode("Generator", "decode", 65536) == mode("Generator", "prefill", 4096) == "graph"
    assert mode("Generator", "prefill", 16384) == mode("generate", "decode", 1024) == "eager"


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
