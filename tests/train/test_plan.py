"""The memory and time that a run will take, before it starts."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from flash_frac.bench.memory import MEMORY_COLUMNS
from flash_frac.bench.rows import read_rows
from flash_frac.bench.training import TRAIN_COLUMNS
from flash_frac.data import prepare
from flash_frac.data.tokenizer import byte_tokenizer, dna_tokenizer
from flash_frac.recipes import installed_recipes
from flash_frac.train import load_recipe
from flash_frac.train.flops import training_flops
from flash_frac.train.memory import GIB, memory_of
from flash_frac.train.monitor import PEAK_TFLOPS
from flash_frac.train.plan import CONTEXT_BYTES, GPU_MEMORY, fits, plan_run, setup_of
from flash_frac.train.speed import MEASURED, Measured, estimate_speed
from tests.commands import frac, make_checkpoint

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEMORY_ROWS = read_rows(RESULTS / "memory" / "h200.csv", MEMORY_COLUMNS)
TRAIN_ROWS = read_rows(RESULTS / "train" / "h200.csv", TRAIN_COLUMNS)


def setup(name="frac-1.3b", *typed, gpus=1):
    return setup_of(load_recipe(name, typed, planned=gpus), gpus)[0]


def plan(name="frac-1.3b", *typed, gpus=1, **options):
    return plan_run(load_recipe(name, typed, planned=gpus), **options)


def run_of_row(row):
    """The name of the model, and the setup, of a committed row, whatever its recipe says today."""
    typed = [
        *shlex.split(row.get("arguments", "")),
        f"--per_device_train_batch_size={row['batch']}",
        f"--gradient_accumulation_steps={row['accumulation']}",
        f"--sequence_length={row['sequence_length']}",
        f"--gradient_checkpointing={row['recompute'] != 'no'}",
        f"--compile_blocks={row['compile'] == 'blocks'}",
        f"--torch_compile={row['compile'] == 'model'}",
    ]
    if row["recompute"] != "no":
        typed.append(f"--gradient_checkpointing_kwargs={{policy: {row['recompute']}}}")
    recipe = load_recipe(row["recipe"].removesuffix(".yaml"), typed, planned=1)
    return recipe.model.config_name, setup_of(recipe, 1)[0]


@pytest.mark.parametrize("row", TRAIN_ROWS, ids=lambda row: row["recipe"])
def test_measured_peaks_of_long_runs(row):
    """Within 10% is the aim; a fudge factor would hide what is not counted."""
    tokens = int(row["batch"]) * int(row["accumulation"]) * int(row["sequence_length"])
    assert tokens == int(row["tokens_per_step"]), "a row of one GPU"
    peak = memory_of(run_of_row(row)[1]).peak / GIB
    if row["compile"] == "no":
        assert peak == pytest.approx(float(row["peak_gib"]), rel=0.1)


def test_measured_speeds_are_the_newest_rows():
    """Those of long runs, else those of six steps."""
    found = {}
    for row in [*MEMORY_ROWS, *TRAIN_ROWS]:
        (name, asked), gpu = run_of_row(row), row["machine"].split()[-1]
        facts = (asked.batch, asked.length, asked.recomputed, asked.compile)
        assert facts[2:] == (row["recompute"], row["compile"])
        speed = int(row["tokens_per_s"])
        mfu = speed * training_flops(asked.config, asked.length / 2) / PEAK_TFLOPS[gpu] / 1e12
        assert not row.get("mfu") or float(row["mfu"]) == pytest.approx(mfu, abs=2e-4)
        key = (name, gpu, int(row["parameters"]), *facts)
        found[key] = Measured(*key, speed, round(mfu, 4))
    assert sorted(MEASURED) == sorted(found.values()), "copy the rows into flash_frac/train/speed"


@pytest.mark.parametrize("row", [*MEMORY_ROWS, *TRAIN_ROWS], ids=lambda row: row["recipe"])
def test_speeds_are_near_rows_that_were_not_used(row, monkeypatch):
    """Within the factor that flash_frac/train/speed.py states."""
    (_, asked), speed = run_of_row(row), float(row["tokens_per_s"])
    assert estimate_speed(asked).source.startswith("measured: the run of")
    facts = (asked.batch, asked.length, asked.recomputed, asked.compile)
    parameters = int(row["parameters"])
    others = [x for x in MEASURED if (x.parameters, *x[3:7]) != (parameters, *facts)]
    assert len(others) == len(MEASURED) - 1
    monkeypatch.setattr("flash_frac.train.speed.MEASURED", others)
    found = estimate_speed(asked)
    assert speed / 1.3 < found.tokens_per_s < 1.3 * speed, found


def test_speed_is_that_of_the_measured_run_or_said_to_be_estimated():
    same = estimate_speed(setup("frac-1.3b", "--per_device_train_batch_size=8"))
    assert same.tokens_per_s == 49181 and same.source.startswith("measured: the run of frac-1.3b")
    smaller = estimate_speed(setup("transformer-1.3b", gpus=4))
    assert smaller.source.startswith("estimated for H200 at the MFU of the run of frac-mixed-1.3b")
    assert "4 times one GPU" in smaller.source
    full = setup("frac-1.3b", "--per_device_train_batch_size=8")
    half = estimate_speed(full, gpu="A100")
    assert half.tokens_per_s == pytest.approx(49181 * 312 / 989.5, rel=0.01)
    other = estimate_speed(full, peak_tflops=312.0)
    assert other.tokens_per_s == half.tokens_per_s and "312.0 TFLOP/s" in other.source
    # No row is of a model nearly as small.
    assert any("at most" in line for line in plan("frac-dna", "--bf16").lines())
    assert not any("at most" in line.partition("disk")[0] for line in plan("frac-390m").lines())
    again = estimate_speed(setup("frac-1.3b", "--gradient_checkpointing"))
    assert again.tokens_per_s == pytest.approx(40337, rel=0.01)
    short = estimate_speed(setup("frac-390m", "--per_device_train_batch_size=2"))
    assert short.tokens_per_s == pytest.approx(2 * 4096 / (48 * 0.0042))
    assert short.source.endswith("limited by launching kernels, 4.2 ms per layer")
    cheap = "--gradient_checkpointing_kwargs={policy: cheap}"
    cheaper = estimate_speed(setup("frac-1.3b", "--gradient_checkpointing", cheap))
    assert "excludes the time of recomputation with policy 'cheap'" in cheaper.source
    assert cheaper.is_bound
    slow = estimate_speed(setup("frac-1.3b", "--bf16=false", "--per_device_train_batch_size=8"))
    assert slow.is_bound and slow.source.startswith("estimated")


def test_a_compiled_run_has_a_row_of_its_own(monkeypatch):
    typed = ["--per_device_train_batch_size=8"]
    plain, compiled = setup("frac-1.3b", *typed), setup("frac-1.3b", *typed, "--compile_blocks")
    assert compiled.compile == "blocks" and plain.compile == "no"
    before = estimate_speed(compiled)
    assert before.source.endswith("the effect of torch.compile is not measured")
    row = next(x for x in MEASURED if x.tokens_per_s == 49181)
    rows = [*MEASURED, row._replace(compile="blocks", tokens_per_s=55000)]
    monkeypatch.setattr("flash_frac.train.speed.MEASURED", rows)
    assert estimate_speed(compiled).tokens_per_s == 55000
    assert estimate_speed(plain).tokens_per_s == 49181


def test_what_makes_memory_smaller_and_larger():
    base = setup("frac-1.3b", "--per_device_train_batch_size=8")
    peak = memory_of(base).peak
    single = replace(base, accumulation=1)
    held = 4 * 1385075808
    assert peak - memory_of(single).peak == pytest.approx(held, rel=0.05)
    assert memory_of(replace(base, recompute=True)).peak < 0.4 * peak
    assert memory_of(replace(base, batch=4)).peak < 0.65 * peak
    assert memory_of(replace(base, context=2, gpus=2)).peak < 0.7 * peak
    # DDP has a copy of the gradients, and sharding a sixteenth of everything.
    assert memory_of(replace(base, gpus=16)).peak - peak == pytest.approx(held, rel=0.01)
    shared = memory_of(replace(base, gpus=16, sharded=True)).kinds
    assert shared["optimizer"] == 8 * 1385075808 / 16
    assert shared["weights"] < 0.25 * 4 * 1385075808
    # It changes no precision.
    for kind in ("activations", "bfloat16 weights"):
        assert shared[kind] == memory_of(base).kinds[kind]
    # Evaluation has logits of all its tokens.
    evaluated = replace(base, batch=1, eval_batch=64)
    assert memory_of(evaluated).moment == "evaluation"


def test_a_run_that_does_not_fit_says_what_to_change():
    asked = plan("frac-1.3b", "--per_device_train_batch_size=16", gpus=16, gpu_memory=80)
    assert not asked.fits
    assert asked.advice.startswith("set per_device_train_batch_size to 4, gradient_accumulation")
    typed = ["--per_device_train_batch_size=4", "--gradient_accumulation_steps=16"]
    after = plan("frac-1.3b", *typed, gpus=16, gpu_memory=80)
    assert after.fits and after.setup.batch == 4
    long = plan("frac-1.3b", "--per_device_train_batch_size=1", "--sequence_length=32768", gpus=1)
    assert fits(long.memory, 140) and not fits(long.memory, 80)
    for words, gpus, memory, message in (
        ("--per_device_train_batch_size=1 --sequence_length=32768", 1, 80, "checkpointing to true"),
        ("--per_device_train_batch_size=1 --fsdp=false", 16, 30, "set .*fsdp to true"),
        ("", 1, 16, "weights and optimizer alone do not fit: use more GPUs with fsdp"),
        ("--sequence_length=4194304", 16, 80, "no batch fits: lower sequence_length"),
        ("--per_device_eval_batch_size=512", 16, 80, "per_device_eval_batch_size to "),
        # No half of it is whole.
        ("--per_device_train_batch_size=15", 16, 40, "per_device_train_batch_size to [1-5], "),
    ):
        found = plan("frac-1.3b", *words.split(), gpus=gpus, gpu_memory=memory)
        assert not found.fits
        assert re.search(message, found.advice), found.advice


def test_the_command_takes_what_train_takes():
    typed = ("--gpus", 16, "--gpu-memory", 80, "--per_device_train_batch_size", 4)
    done = frac("plan", "frac-1.3b", *typed, "--gradient_accumulation_steps=4")
    assert done.returncode == 0, done.stderr
    for words in (
        "1,385,075,808 parameters, layers: 48 frac",
        "1,048,576 tokens: 4 x 4096 per GPU, 4 batches, 16 GPUs (FSDP2)",
        "GiB  activations",
        "fits in 80 GiB",
        "measured: the run of frac-1.3b on one H200 (47,451 tokens/s at 4 x 4096)",
        "days for 95,367 steps, 99,999,547,392 tokens",
        "15.5 GiB per checkpoint, at most 61.9 GiB for 3 and one being written; final model 5.2",
        "the size of HuggingFaceTB/smollm-corpus is unknown",
    ):
        assert words in done.stdout
    done = frac("plan", "frac-1.3b", "--gpus", 16, "--gpu-memory", 20)
    assert done.returncode == 1 and "DOES NOT FIT in 20 GiB" in done.stdout
    assert "warning   set " in done.stdout
    done = frac("plan", "frac-1.3b", "--context_parallel_size", 3, "--gpus", 16)
    assert done.returncode == 1 and "must divide the number of processes, 16" in done.stderr
    assert "unknown key per_device" in frac("plan", "small", "--per_device", "1").stderr
    unknown = frac("plan", "frac-1.3b", "--gpu", "H2").stderr
    assert "gpu must be one of H200" in unknown and "fsdp" not in unknown
    for memory in (0, -4, "nan", "inf"):
        done = frac("plan", "frac-1.3b", "--gpu-memory", memory)
        assert done.returncode == 1 and done.stdout == ""
        assert "gpu_memory must be a positive number of GiB, got" in done.stderr
    shown = " ".join(frac("plan", "--help").stdout.replace("│", " ").split())
    assert all(name in shown for name in GPU_MEMORY)


def test_the_best_checkpoint_is_kept_beside_the_last():
    best = ["--save_total_limit=1", "--load_best_model_at_end"]
    line = next(x for x in plan("frac-390m", *best).lines() if x.startswith("disk"))
    assert "for 2 and one being written" in line


# Without a name here, one GPU of 80 GB.
MACHINES = {"1.3b": 16, "1.3b-40gb": 16, "390m": 8, "390m-40gb": 8}


# The allocator reserves at most this much of the peak.
RESERVED = 1.1


def test_what_the_allocator_reserves():
    assert all(float(x["reserved_gib"]) < RESERVED * float(x["peak_gib"]) for x in MEMORY_ROWS)


@pytest.mark.parametrize("name", [x for x in installed_recipes() if x != "mamba2-1.3b"])
def test_every_recipe_fits_its_machine(name):
    gpus = next((n for end, n in MACHINES.items() if name.endswith(end)), 1)
    memory = 40 if name.endswith("40gb") else 80
    found = plan(name, gpus=gpus, gpu_memory=memory)
    assert found.fits, "\n".join(found.lines())
    assert RESERVED * found.memory.peak + CONTEXT_BYTES <= memory * GIB
    # The preset for smaller cards is there because the other does not fit them.
    if name.endswith("40gb"):
        assert not plan(name.removesuffix("-40gb"), gpus=gpus, gpu_memory=memory).fits


def test_a_run_from_a_checkpoint(write_recipe, tmp_path):
    """Of which only the configuration is read."""
    make_checkpoint(tmp_path / "before")
    (tmp_path / "before" / "model.safetensors").unlink()
    recipe = write_recipe(config_name=None, model_name_or_path=str(tmp_path / "before"))
    assert plan(recipe).setup.config.vocab_size == 259
    with pytest.raises(ValueError, match=r"model_name_or_path \./none was not found"):
        plan(recipe, "--model_name_or_path=./none")


def test_what_is_not_counted_is_said():
    notes = plan("frac-390m", "--optim=lion_32bit", "--torch_compile=true").notes
    assert notes[0] == "optim lion_32bit is counted as adamw_torch, two numbers per weight"
    assert notes[1].startswith("torch_compile is not counted")
    (note,) = plan("frac-390m", "--compile_blocks").notes
    assert note.startswith("compile_blocks is not counted")
    offload = ["--fsdp_config={cpu_offload: true}"]
    (note,) = plan("frac-1.3b", *offload, gpus=4).notes
    assert note.startswith("cpu_offload is not counted")


def test_tokens_that_are_there(write_recipe, tmp_path, text_folder):
    """Known where the files were tokenised before; nothing is tokenised for a plan."""
    recipe = write_recipe(cache_dir=str(tmp_path / "tokens"), max_steps=-1, num_train_epochs=3)
    before = plan(recipe)
    assert before.available is None and before.steps is None
    assert "not tokenised yet" in before.data and not (tmp_path / "tokens").exists()
    assert any(line.startswith("time      unknown") for line in before.lines())
    done = frac("train", recipe, "--max_steps", 1)
    assert done.returncode == 0, done.stderr
    assert "data/text" in plan("small").data
    after = plan(recipe)
    assert after.available is not None and after.available > 10_000
    assert after.steps == int(3 * after.available / (2 * 64))
    assert f"{after.available:,} available" in after.data and "times" in after.data


def test_tokens_of_other_settings_are_not_available(write_recipe, tmp_path):
    """The same files, tokenised otherwise, or changed since."""
    text, cache = tmp_path / "text.jsonl", tmp_path / "tokens"
    lines = [json.dumps({"text": "acgt" * n, "other": "a" * n}) for n in range(1, 41)]
    text.write_text("\n".join(lines))
    paths = {"data_files": [str(text)], "cache_dir": str(cache)}
    recipe = write_recipe(**paths, held_out=0.1)
    loaded = load_recipe(recipe)
    seed = loaded.training.seed
    tokens = prepare(loaded.data, byte_tokenizer(), seed=seed, progress=False).train.num_tokens
    assert plan(recipe).available == tokens
    for typed, reason in (
        ("--tokenizer=dna", "tokenizer"),
        ("--held_out=0.5", "held_out"),
        ("--held_out=0 --eval_strategy=no", "held_out and seed"),
        ("--seed=7", "seed"),
        ("--add_bos_token=true", "add_bos_token"),
        ("--text_field=other", "text_field"),
    ):
        found = plan(recipe, *typed.split())
        assert found.available is None
        assert found.data.endswith(f"tokenised with another {reason}")
    assert "cannot be loaded" in plan(recipe, "--tokenizer=./nowhere").data
    text.touch()
    assert plan(recipe).available == tokens
    text.write_text("\n".join(lines[:30]))
    shorter = plan(recipe)
    assert shorter.available is None and shorter.data.endswith("changed since tokenised")
    # Both ways of tokenising it are found again.
    text.write_text("\n".join(lines))
    dna = load_recipe(recipe, ["--tokenizer=dna"])
    other = prepare(dna.data, dna_tokenizer(), seed=seed, progress=False).train.num_tokens
    found = plan(recipe).available, plan(recipe, "--tokenizer=dna").available
    assert found == (tokens, other)


def test_every_gpu_has_a_memory_and_a_rate():
    assert GPU_MEMORY.keys() == PEAK_TFLOPS.keys()
