"""`FracStream`: any sequence of calls equals one pass over the tokens."""

import subprocess
import sys

import pytest
import torch

import flash_frac.inference.state
from flash_frac.inference import FracStream, Generator, SamplingSettings
from flash_frac.ops import causal_conv, frac_scan
from tests.inference.conftest import assert_holds, assert_same, take, tensors
from tests.models.conftest import make_model


@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize("cuts", [[40], [1, 1, 38], [17, 20, 3], [39, 1]])
def test_any_cut_is_one_pass(model, ids, monkeypatch, piece, cuts):
    monkeypatch.setattr(flash_frac.inference.state, "PIECE", piece)
    stream = FracStream(model, batch_size=3)
    for part in ids.split(cuts, 1):
        assert stream.feed(part) is stream
    assert_holds(stream, ids)
    assert stream.num_tokens == 40 and stream.lengths == (40, 40, 40)
    assert stream.nbytes == sum(x.nbytes for x in tensors(stream.state))


def test_kinds_of_inputs(model, ids):
    row = ids[0]
    expected = FracStream(model).feed(row)
    for inputs in (row.tolist(), row[None], [row.tolist()], [row], row.int()):
        assert_same(FracStream(model).feed(inputs), expected)
    assert_same(FracStream(model).feed(row).feed([]).feed(row[:0]), expected)


def test_sequences_of_different_lengths(model, ids, monkeypatch):
    monkeypatch.setattr(flash_frac.inference.state, "PIECE", 7)
    stream = FracStream(model, batch_size=3)
    stream.feed([ids[0, :30].tolist(), ids[1, :5].tolist(), ids[2, :29].tolist()])
    # One that gets nothing stays as it is.
    stream.feed([ids[0, 30:].tolist(), [], ids[2, 29:].tolist()])
    stream.feed([[], ids[1, 5:].tolist(), []])
    for n in range(3):
        assert_holds(stream.select(n), ids[n : n + 1])
    with pytest.raises(ValueError, match=r"inputs must hold tokens for every sequence, got \[1, 0"):
        FracStream(model, batch_size=3).feed([[4], [], [5]])


def test_greedy_is_that_of_the_model(model, ids):
    for batch in (ids, ids[1:2]):
        stream = FracStream(model, batch_size=len(batch)).feed(batch)
        new = take(stream, 30)
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30}
        assert torch.equal(torch.cat([batch, new], 1), model.generate(batch, **options))
        assert_holds(stream, torch.cat([batch, new], 1))


def test_ending(model, ids):
    """A sequence that has ended holds its end token, and nothing of what fills it up."""
    free = take(FracStream(model, batch_size=3).feed(ids), 30)
    eos = int(free[0, 3])
    stream = FracStream(model, batch_size=3).feed(ids)
    got = take(stream, 30, eos=eos)
    options = {"do_sample": False, "eos_token_id": eos, "max_new_tokens": 30}
    assert torch.equal(torch.cat([ids, got], 1), model.generate(ids, **options))
    for n in range(3):
        ends = (got[n] == eos).nonzero()
        length = int(ends[0]) + 1 if len(ends) else got.shape[1]
        assert stream.lengths[n] == 40 + length
        assert_holds(stream.select(n), torch.cat([ids[n], got[n, :length]])[None])
    model.generation_config.eos_token_id = [60, eos]
    again = take(FracStream(model).feed(ids[0]), 30, eos=True)
    assert again.shape == (1, int((free[0] == eos).nonzero()[0]) + 1)


def test_sampling(model, ids):
    options = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
    first, second, third = (
        take(FracStream(model, batch_size=3).feed(ids), 20, seed=seed, **options)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, third)
    # All of the past counts: a huge penalty leaves only tokens that have not come up.
    stream = FracStream(model).feed(ids[0])
    fresh = take(stream, 10, repetition_penalty=1e6)[0].tolist()
    assert len(set(fresh) | set(ids[0].tolist())) == 10 + len(set(ids[0].tolist()))


def test_draws_are_those_of_the_generator(model, ids):
    """And without a seed, torch's default generator decides."""
    options = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.3}
    drawn = take(FracStream(model, batch_size=3).feed(ids), 12, seed=5, **options)
    sampling = SamplingSettings(**options)
    made = Generator(model).generate(ids, max_new_tokens=12, sampling=sampling, seed=5)
    assert torch.equal(made[:, 40:], drawn)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        stream = FracStream(model).feed(ids[0])
        found.append(torch.cat([take(stream, 6, **options), take(stream, 6, **options)], 1))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    torch.manual_seed(1)
    take(FracStream(model).feed(ids[0]), 6)
    assert int(torch.randint(2**62, ())) == int(
        torch.randint(2**62, (), generator=torch.Generator().manual_seed(1))
    )


def test_logits_that_are_no_numbers(stream):
    """The stream is left as it was."""
    before = stream.fork()
    kept = stream.logits[1].clone()
    stream.logits[1, 7] = torch.nan
    with pytest.raises(RuntimeError, match="logits of sequence 1 are not finite"):
        take(stream, 3)
    stream.logits[1] = kept
    assert_same(stream, before)
    stream.logits[:, ::2] = -torch.inf
    assert (take(stream, 1) % 2 == 1).all()


def test_leaving_the_loop(model, ids):
    expected = take(FracStream(model).feed(ids[0]), 12)
    stream, got = FracStream(model).feed(ids[0]), []
    for token in stream.generate(eos=False):
        got.append(token)
        if len(got) == 5:
            break
    assert stream.num_tokens == 45
    assert_holds(stream, torch.cat([ids[:1], torch.stack(got, 1)], 1))
    assert torch.equal(torch.cat([torch.stack(got, 1), take(stream, 7)], 1), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_inside_the_model(model, ids, error):
    """The first layers have read the token, the last has not: neither has the stream."""
    expected = take(FracStream(model).feed(ids[0]), 12)
    stream, got, calls = FracStream(model).feed(ids[0]), [], []

    def interrupt(*_):
        calls.append(None)
        if len(calls) == 4:
            raise error

    handle = model.model.layers[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        got.extend(stream.generate(eos=False))
    handle.remove()
    assert stream.num_tokens == 43
    assert torch.equal(torch.stack(got, 1), expected[:, :3])
    before = stream.fork()
    handle = model.model.layers[-1].register_forward_pre_hook(interrupt)
    calls[:] = [None] * 3
    with pytest.raises(error):
        stream.feed(ids[1])
    handle.remove()
    assert_same(stream, before)
    assert torch.equal(take(stream, 9), expected[:, 3:])


def test_fork(stream, ids):
    before, fork, expected = stream.fork(), stream.fork(), take(stream.fork(), 9)
    fork.feed(ids).advance(1.5)
    assert_same(stream, before)
    # Not even who writes to the logits, to forbid tokens, disturbs another stream.
    stream.logits[:] = 0
    assert torch.equal(take(before, 9), expected)
    assert not take(stream.fork(), 1).any()


def test_nested_marks(stream, ids):
    moments, marks = [stream.fork()], [stream.mark()]
    for part in ids.split(10, 1):
        stream.feed(part)
        moments.append(stream.fork())
        marks.append(stream.mark())
    list(stream.generate(max_new_tokens=3, eos=False))
    # To the last one, and again after other ways on from there.
    for _ in range(2):
        assert_same(stream.rollback(), moments[4])
        stream.feed(ids).advance(3)
    assert_same(stream.rollback(marks[2]), moments[2])
    stream.feed(ids)
    assert_same(stream.rollback(), moments[2])
    with pytest.raises(ValueError, match="mark must be one of this stream's"):
        stream.rollback(marks[3])
    fork = stream.fork().feed(ids)
    assert_same(stream.release(), moments[2])
    assert_same(stream.rollback(), moments[1])
    assert_same(stream.release(marks[0]), moments[1])
    with pytest.raises(ValueError, match="there is no mark to roll back to or release; call mark"):
        stream.rollback()
    assert_same(fork.rollback(), moments[2])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"frac_alpha_fixed": 0.5}, {"frac_rho_eps": 0.01}])
@pytest.mark.parametrize("gap", [1, 2, 100])
def test_advance_is_the_recurrence_without_input(ids, gap, changes):
    model = make_model(**changes)
    for block in model.model.layers:
        block.mixer.dyn_proj.bias.normal_()
    stream = FracStream(model, batch_size=3).feed(ids)
    before = [state.clone() for state in stream.state]
    after = stream.advance(gap).state
    for block, old, new in zip(model.model.layers, before, after, strict=True):
        mixer = block.mixer
        nothing = torch.zeros(3, gap, old.conv.shape[1], dtype=torch.float64)
        u, window = causal_conv(nothing, mixer.conv1d.weight, mixer.conv1d.bias, window=old.conv)
        read, write, log_decay = mixer.controls(nothing, u)
        u = u.unflatten(-1, (mixer.num_heads, -1))
        step = {"initial_state": old.recurrent, "backend": "recurrent"}
        _, recurrent = frac_scan(u, read, 0 * write, log_decay, **step)
        # The recurrence adds a change to the state, and rounds like the state before.
        error = (new.recurrent - recurrent).abs()
        assert (error <= gap * 1e-15 * old.recurrent.abs()).all()
        assert torch.equal(new.conv, window)
        assert not torch.equal(new.recurrent, old.recurrent)


def test_advance_adds_up(stream):
    fork, nothing = stream.fork(), stream.fork()
    assert_same(nothing.advance(0), stream)
    stream.advance(0.75).advance(1e5).advance(2.5)
    fork.advance(1e5 + 3.25)
    for x, y in zip(stream.state, fork.state, strict=True):
        torch.testing.assert_close(x.recurrent, y.recurrent, rtol=1e-11, atol=0)
        assert not y.conv.any()
    window = [state.conv for state in nothing.state]
    shifted = [state.conv for state in nothing.fork().advance(1.9).state]
    for x, y in zip(window, shifted, strict=True):
        assert torch.equal(x[..., 1:], y[..., :-1]) and not y[..., -1].any()
    assert stream.logits is None and stream.lengths == (40, 40, 40)
    with pytest.raises(ValueError, match=r"generate needs the logits .* feed at least one token"):
        stream.generate(max_new_tokens=1)
    assert take(stream.feed([[5], [5], [5]]), 2).shape == (3, 2)
    for gap in (-1, float("nan"), float("inf"), 10**400, "5"):
        with pytest.raises(ValueError, match="gap must be a finite number of tokens, 0 or more"):
            stream.advance(gap)


def test_many_small_gaps_in_float32(ids):
    """Roundings of single steps must not all go the same way."""
    stream = FracStream(make_model(torch.float32), batch_size=3).feed(ids)
    whole = stream.fork().advance(1000)
    for _ in range(1000):
        stream.advance(1)
    for x, y in zip(stream.state, whole.state, strict=True):
        slow = slice(4, None)
        error = (x.recurrent - y.recurrent)[:, :, slow] / y.recurrent[:, :, slow]
        assert error.abs().median() < 3e-6


def test_select_and_cat(model, stream, ids):
    rows = [FracStream(model).feed(row) for row in ids]
    for n, row in enumerate(rows):
        assert_holds(stream.select(n), ids[n : n + 1])
        assert_same(stream.select([n]), stream.select(slice(n, n + 1)))
        assert_holds(row, ids[n : n + 1])
    assert_same(stream.select(-1), stream.select(2))
    assert_same(
        FracStream.cat([stream.select([2]), stream.select([0, 1])]), stream.select([2, 0, 1])
    )
    assert_holds(FracStream.cat(rows), ids)
    # They are streams of their own.
    before, part = stream.fork(), stream.select([0, 2])
    part.feed(ids[:2])
    FracStream.cat([stream, part]).advance(5)
    assert_same(stream, before)
    assert part.lengths == (80, 80)
    assert FracStream.cat([stream, stream.fork().advance(1)]).logits is None
    for index, problem in ((3, "among 3 sequences, got 3"), ([], "at least one sequence")):
        with pytest.raises(ValueError, match=f"index must choose {problem}"):
            stream.select(index)
    with pytest.raises(ValueError, match="streams must be at least one, and share one model"):
        FracStream.cat([stream, FracStream(make_model())])
    with pytest.raises(ValueError, match="streams must be at least one"):
        FracStream.cat([])


@pytest.mark.slow
def test_memory_is_constant():
    """A million tokens do the same in a few seconds more."""
    code = """
import resource, torch
from flash_frac.models import FracConfig, FracForCausalLM
from flash_frac.inference import FracStream, Generator, SamplingSettings
torch.set_num_threads(1)
sizes = dict(num_hidden_layers=2, num_attention_heads=1, frac_num_modes=4)
stream = FracStream(FracForCausalLM(FracConfig(vocab_size=32, hidden_size=8, **sizes)))
peaks = []
for number in (20_000, 140_000, 140_000):
    stream.feed(torch.randint(0, 32, (number,)))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(stream.num_tokens, stream.nbytes, peaks[-1] - peaks[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_tokens, nbytes, growth = map(int, done.stdout.split())
    assert num_tokens == 300_000 and nbytes == 2 * (4 * 16 + 16 * 3) * 4
    # In kilobytes: a few copies of the ids. One pass over a call would be a hundred times that.
    assert growth < 5 * 140_000 * 8 / 1024


def test_the_mode_of_the_model_is_kept(model, ids):
    model.train()
    model.model.layers[0].mixer.eval()
    modes = [module.training for module in model.modules()]
    model.gradient_checkpointing_enable()
    stream = FracStream(model, batch_size=3).feed(ids)
    next(stream.generate(eos=False))
    stream.advance(1)
    assert modes == [module.training for module in model.modules()] and True in modes
    assert_same(
        FracStream(model, batch_size=3).feed(ids), FracStream(make_model(), batch_size=3).feed(ids)
    )
    assert not any(x.requires_grad for x in tensors(stream.state))
    assert torch.is_grad_enabled()


def test_streams_of_one_model_do_not_meet(model, ids):
    one, two = FracStream(model).feed(ids[0]), FracStream(model).feed(ids[1])
    first, second = [], []
    for x, y in zip(one.generate(eos=False), two.generate(eos=False), strict=True):
        first.append(x)
        second.append(y)
        if len(first) == 9:
            break
    assert torch.equal(torch.stack(first, 1), take(FracStream(model).feed(ids[0]), 9))
    assert torch.equal(torch.stack(second, 1), take(FracStream(model).feed(ids[1]), 9))


def test_errors(model, ids):
    stream = FracStream(model)
    for inputs, problem in (
        (ids, "inputs must be for 1 sequences, the batch_size of the stream, got 3"),
        (ids[None], r"inputs must have shape \(T,\) or \(B, T\), got \(1, 3, 40\)"),
        ([61], r"inputs must be in \[0, 61\), got ids from 61 to 61; the vocabulary has 61"),
        ([-1, 5], r"inputs must be in \[0, 61\), got ids from -1 to 5; the vocabulary has 61"),
        ([0.5], "inputs must be integer token ids"),
        (torch.rand(3), "inputs must be integer token ids, got torch.float32"),
        ("text", r"inputs must be ids, got text; for text, use FracStream\(model, tokenizer\)"),
    ):
        with pytest.raises(ValueError, match=problem):
            stream.feed(inputs)
        assert stream.num_tokens == 0 and stream.logits is None
    with pytest.raises(ValueError, match="generate needs the logits of the next token"):
        stream.generate(max_new_tokens=3)
    stream.feed(ids[0])
    with pytest.raises(ValueError, match="max_new_tokens must be None or at least 1, got 0"):
        stream.generate(max_new_tokens=0)
    with pytest.raises(ValueError, match="temperature must be"):
        stream.generate(temperature=-1.0)
    with pytest.raises(ValueError, match="model must be a FracForCausalLM, got Linear"):
        FracStream(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        FracStream(model, batch_size=0)
