"""Contracts of every operator, on every backend of the table that can run here.

Any split equals the whole; later tokens do not change earlier results; packed sequences are
independent; padding is an identity step. Every backend in `BACKENDS` is tested, and every operator
must have an entry in `CONTRACTS`. Outputs, states and gradients are compared with the specification
in float64: to 1e-12, or by the error rule if a backend does not support float64.
"""

from itertools import pairwise

import pytest
import torch

from flash_frac.ops import BACKENDS
from flash_frac.ops.backends import OPERATORS
from flash_frac.ops.testing import relative_error
from tests.backends import DEVICE, INTERPRETED, backends_here, dtype_of, repeat
from tests.errors import assert_as_good, widen, with_gradients
from tests.ops.contracts import CONTRACTS, OTHER_CONTROLS, Inputs

B, T = 2, 70
EXACT = 1e-12  # float64 against float64, relative: thousands of roundings
# The error of fewer numbers is a matter of luck in float32; tests/kernels measures those.
FEW = 100
SPECIFICATION = "recurrent"


def flatten(inputs, dtype):
    """Inputs as a list of tensors to differentiate by."""
    state = [] if inputs.state is None else [inputs.state]
    return [x.to(DEVICE, dtype) for x in (*inputs.tokens, *inputs.parameters, *state)]


def restore(leaves, like):
    """The inverse of `flatten`."""
    num_tokens, num = len(like.tokens), len(like.tokens) + len(like.parameters)
    state = None if like.state is None else leaves[-1]
    return Inputs(list(leaves[:num_tokens]), list(leaves[num_tokens:num]), state)


def given(outputs, state):
    return outputs if state is None else [*outputs, state]


def one_after_the_other(results):
    """Outputs and states of separate calls, joined."""
    outputs = [torch.cat(parts, 1) for parts in zip(*(r[0] for r in results), strict=True)]
    states = [r[1] for r in results if r[1] is not None]
    return given(outputs, torch.cat(states) if states else None)


def assert_same(operator, backend, inputs, tested, plain):
    """`tested` on the backend gives what `plain` gives by the specification in float64.

    Both are functions of `run` and inputs, and return lists of tensors.
    """
    contract, dtype = CONTRACTS[operator], dtype_of(backend)

    def function(form, run, name):
        def call(*leaves):
            return form(
                lambda x, **options: run(x, backend=name, **options), restore(leaves, inputs)
            )

        return call

    leaves = flatten(inputs, dtype)
    expected = function(plain, contract.specification, SPECIFICATION)
    got = with_gradients(function(tested, contract.run, backend), leaves)
    exact = with_gradients(expected, widen(leaves))
    if dtype == torch.float64:
        errors = [relative_error(a, b) for a, b in zip(got, exact, strict=True)]
        assert max(errors) < EXACT, errors
        return
    usual = with_gradients(expected, leaves)
    for i, (a, b, c) in enumerate(zip(got, usual, exact, strict=True)):
        assert a.shape == c.shape
        if a.numel() >= FEW:
            assert_as_good(a, b, c, f"tensor {i}")


def check_split(operator, backend, cuts=(16, 32)):
    def in_pieces(run, inputs):
        state, parts = inputs.state, []
        for start, end in pairwise([0, *cuts, T]):
            piece = inputs.part(slice(None), slice(start, end))._replace(state=state)
            outputs, state = run(piece)
            parts.append((outputs, None))
        return given(one_after_the_other(parts), state)

    inputs = CONTRACTS[operator].draw(B, T, B)
    assert_same(operator, backend, inputs, in_pieces, lambda run, inputs: given(*run(inputs)))


def check_packing(operator, backend, lengths=(0, 40, 0, 0, 1, 16, 17, 0)):
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)

    def packed(run, inputs):
        return given(*run(inputs, cu_seqlens=bounds))

    def separate(run, inputs):
        parts = []
        for n, (start, end) in enumerate(pairwise(bounds.tolist())):
            sequence = inputs.part(slice(None), slice(start, end))
            state = None if inputs.state is None else inputs.state[n : n + 1]
            parts.append(run(sequence._replace(state=state)))
        return one_after_the_other(parts)

    inputs = CONTRACTS[operator].draw(1, sum(lengths), len(lengths))
    assert_same(operator, backend, inputs, packed, separate)


def check_beginning(operator, backend):
    """Without a state, sequences begin with zeros, packed or not."""
    bounds = torch.tensor([0, 33, T], device=DEVICE)

    def begin(run, inputs):
        inputs = inputs._replace(state=None)
        return [*given(*run(inputs)), *given(*run(inputs, cu_seqlens=bounds))]

    def from_zeros(run, inputs):
        inputs = inputs._replace(state=torch.zeros_like(inputs.state))
        row = inputs._replace(state=inputs.state[:1])
        return [*given(*run(row)), *given(*run(inputs, cu_seqlens=bounds))]

    inputs = CONTRACTS[operator].draw(1, T, 2)
    assert_same(operator, backend, inputs, begin, from_zeros)


def check_padding(operator, backend):
    """On the left, on the right, inside, at every second token, everywhere, and nowhere."""
    mask = torch.ones(6, 40, dtype=torch.long, device=DEVICE)
    mask[0, :9], mask[1, 13:], mask[2, 5:8], mask[2, 33], mask[3, ::2], mask[4] = 0, 0, 0, 0, 0, 0

    def padded(run, inputs):
        outputs, state = run(inputs, mask=mask)
        return given([y[mask == 1][None] for y in outputs], state)

    def without(run, inputs):
        rows = range(len(mask))
        return one_after_the_other([run(inputs.part([n], mask[n] == 1)) for n in rows])

    inputs = CONTRACTS[operator].draw(*mask.shape, len(mask))
    assert_same(operator, backend, inputs, padded, without)


def assert_untouched(operator, backend, sizes, touched, *, states=(), **options):
    """Changing the tokens where `touched` (T,) is set changes nothing elsewhere, to the last bit.

    Neither outputs, nor the new states that are named, nor the gradients of those.
    """
    contract, dtype = CONTRACTS[operator], dtype_of(backend)
    inputs, others = (contract.draw(*sizes) for _ in range(2))
    tokens = [x.clone() for x in inputs.tokens]
    for x, y in zip(tokens, others.tokens, strict=True):
        x[:, touched] = y[:, touched]
    touched, changing = touched.to(DEVICE), []

    def elsewhere(*leaves):
        outputs, state = contract.run(restore(leaves, inputs), backend, **options)
        changing.append(outputs[0][:, touched].detach())
        kept = [] if state is None else [state[n] for n in states]
        return [*(y[:, ~touched] for y in outputs), *kept]

    leaves = flatten(inputs, dtype)
    expected = with_gradients(elsewhere, leaves)
    got = with_gradients(elsewhere, flatten(inputs._replace(tokens=tokens), dtype))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not torch.equal(*changing)
    gradients = restore(got[-len(leaves) :], inputs).tokens
    assert all((x[:, touched] == 0).all() for x in gradients)


def check_causality(operator, backend):
    for t in (1, T - 30):
        assert_untouched(operator, backend, (1, T, 1), torch.arange(T) >= t)


def check_isolation(operator, backend):
    """Packed sequences do not touch."""
    time = torch.arange(60)
    bounds = torch.tensor([0, 20, 30, 60], device=DEVICE)
    touched = (time >= 20) & (time < 30)
    assert_untouched(operator, backend, (1, 60, 3), touched, states=(0, 2), cu_seqlens=bounds)


# Where a token that is not finite may stand: at the ends of the sequence, and of halves of chunks.
# The interpreter has time for one: the last token of an earlier half.
POSITIONS = (15,) if INTERPRETED else (0, 1, 15, 16, 31, 32, 44)
LENGTH = 20 if INTERPRETED else 45


def bad_tokens(rows):
    """In every second of `rows` sequences one: which tokens are bad, come after one, or before."""
    bad = torch.zeros(rows, LENGTH, dtype=torch.bool)
    for row, position in zip(range(0, rows, 2), POSITIONS, strict=False):
        bad[row, position] = True
    return bad, bad.cumsum(1) > 0, bad.flip(1).cumsum(1).flip(1) > 0


def with_bad(x, bad, value):
    """One number of each bad token of x (B, T, ...) is `value`."""
    x = x.clone()
    flat = x.flatten(2)
    flat[..., -1] = flat[..., -1].masked_fill(bad, value)
    return x


def check_bad_tokens(operator, backend, value, packed):
    """inf or NaN spoils its own sequence from there on and nothing else; in gradients, up to there.

    With the gradients of its own sequence a token may do what it likes: they are products with it.
    """
    contract, dtype = CONTRACTS[operator], dtype_of(backend)
    rows = 2 * len(POSITIONS)
    bad, after, before = bad_tokens(rows)
    shape, options = (rows, LENGTH), {}
    if packed:
        shape, bad = (1, rows * LENGTH), bad.view(1, -1)
        options["cu_seqlens"] = torch.arange(0, rows * LENGTH + 1, LENGTH, device=DEVICE)
    inputs = contract.draw(*shape, rows)

    def run(tokens, spoil):
        """Outputs, states and the gradients of tokens, by gradients that `spoil` may change."""
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in tokens]
        others = flatten(inputs._replace(tokens=[]), dtype)
        outputs, state = contract.run(restore([*leaves, *others], inputs), backend, **options)
        generator = torch.Generator().manual_seed(1)
        dys = [spoil(torch.randn(y.shape, generator=generator)).to(y) for y in outputs]
        gradients = torch.autograd.grad(outputs, leaves, dys, allow_unused=True)
        kept = (y.detach().reshape(rows, LENGTH, -1).cpu() for y in outputs)
        found = (g.reshape(rows, LENGTH, -1).cpu() for g in gradients if g is not None)
        return list(kept), None if state is None else state.detach().cpu(), list(found)

    def quiet(dy):
        # No output that is spoilt has a gradient.
        return dy.masked_fill(after.view(*dy.shape[:2], *(1,) * (dy.ndim - 2)), 0)

    expected, states, slopes = run(inputs.tokens, quiet)
    for i, x in enumerate(inputs.tokens):
        # A log_decay of inf is refused.
        number = torch.nan if (x <= 0).all() else value
        tokens = [*inputs.tokens[:i], with_bad(x, bad, number), *inputs.tokens[i + 1 :]]
        outputs, got_states, got_slopes = run(tokens, quiet)
        for got, want in zip(outputs, expected, strict=True):
            assert torch.equal(got[~after], want[~after]), i
        for got, want in zip(got_slopes, slopes, strict=True):
            assert torch.equal(got[1::2], want[1::2]), i
        # Controls may make something of an inf.
        seen = [not y[bad.view(rows, -1)].isfinite().all() for y in outputs]
        assert any(seen) or (operator == "controls" and value == torch.inf), i
        if got_states is not None:
            assert torch.equal(got_states[1::2], states[1::2]), i
    _, _, expected = run(inputs.tokens, lambda dy: dy)
    _, _, slopes = run(inputs.tokens, lambda dy: with_bad(dy, bad, value))
    for got, want in zip(slopes, expected, strict=True):
        assert torch.equal(got[~before], want[~before])
    assert not all(g[bad.view(rows, -1)].isfinite().all() for g in slopes)


def cases():
    """Operators and backends here; an implementation that two backends share is tested once."""
    found = {}
    for backend in backends_here():
        for operator in OPERATORS:
            implementation = getattr(BACKENDS[backend], operator)
            found.setdefault((operator, implementation, dtype_of(backend)), (operator, backend))
    return list(found.values())


every_case = pytest.mark.parametrize(("operator", "backend"), cases())
every_packed_case = pytest.mark.parametrize(
    ("operator", "backend"), [case for case in cases() if CONTRACTS[case[0]].packs]
)
every_beginning = pytest.mark.parametrize(
    ("operator", "backend"), [case for case in cases() if CONTRACTS[case[0]].begins]
)


def test_every_operator_has_a_contract():
    assert set(CONTRACTS) == set(OPERATORS)


@pytest.mark.parametrize("cuts", [repeat((1, 2, 3)), repeat((16, 32)), (0, 33, 33, T - 1)], ids=str)
@every_case
def test_any_split_is_the_whole(operator, backend, cuts):
    check_split(operator, backend, cuts)


@every_beginning
def test_no_state_is_zeros(operator, backend):
    check_beginning(operator, backend)


@every_case
def test_causality(operator, backend):
    check_causality(operator, backend)


LENGTHS = [(70,), (1,) * 9, (0, 40, 0, 0, 1, 16, 17, 0), (0,), (0, 0)]
# Past a group of 16 chunks of the torch backend; the interpreter would take long for it.
LENGTHS += [] if INTERPRETED else [(515, 3, 1, 33)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@every_packed_case
def test_packed_is_separate(operator, backend, lengths):
    check_packing(operator, backend, lengths)


@every_packed_case
def test_packed_sequences_do_not_touch(operator, backend):
    check_isolation(operator, backend)


# Packed sequences are in the interpreter's way too, and tell more than rows of a batch.
IN_BATCHES = [c for c in cases() if not (INTERPRETED and CONTRACTS[c[0]].packs)]


@pytest.mark.parametrize("value", [torch.nan] if INTERPRETED else [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize(("operator", "backend"), IN_BATCHES)
def test_a_bad_token_spoils_its_own_future(operator, backend, value):
    check_bad_tokens(operator, backend, value, packed=False)


@every_packed_case
def test_a_bad_token_spoils_no_packed_sequence(operator, backend):
    check_bad_tokens(operator, backend, torch.nan, packed=True)


@every_case
def test_padding_is_an_identity_step(operator, backend):
    check_padding(operator, backend)


@pytest.mark.parametrize("name", OTHER_CONTROLS)
@pytest.mark.parametrize("backend", [b for operator, b in cases() if operator == "controls"])
def test_other_settings_of_the_controls(monkeypatch, name, backend):
    monkeypatch.setitem(CONTRACTS, "controls", OTHER_CONTROLS[name])
    for check in (check_split, check_causality, check_packing, check_isolation, check_padding):
        check("controls", backend)
    check_bad_tokens("controls", backend, torch.nan, packed=False)


def without_state(u, read, write, log_decay, state, cu_seqlens):
    return BACKENDS["torch"].scan(u, read, write, log_decay, None, cu_seqlens)


def sees_the_future(u, *rest):
    return BACKENDS["torch"].scan(u + u.mean(1, keepdim=True), *rest)


def always_decays(u, read, write, log_decay, *rest):
    return BACKENDS["torch"].scan(u, read, write, log_decay - 1e-6, *rest)


def one_sequence(u, read, write, log_decay, state, cu_seqlens):
    if cu_seqlens is None:
        return BACKENDS["torch"].scan(u, read, write, log_decay, state, None)
    y, final = BACKENDS["torch"].scan(u, read, write, log_decay, state[:1], None)
    return y, final.expand_as(state)


@pytest.mark.parametrize(
    ("check", "scan"),
    [
        (check_split, without_state),
        (check_causality, sees_the_future),
        (check_packing, one_sequence),
        (check_isolation, one_sequence),
        (check_padding, always_decays),
    ],
)
def test_a_new_backend_is_held_to_the_contracts(monkeypatch, check, scan):
    """By being in the table, and a wrong one is caught."""
    monkeypatch.setitem(BACKENDS, "new", BACKENDS["torch"]._replace())
    assert "new" in backends_here()
    check("scan", "new")
    monkeypatch.setitem(BACKENDS, "new", BACKENDS["torch"]._replace(scan=scan))
    assert ("scan", "new") in cases()
    with pytest.raises(AssertionError):
        check("scan", "new")
    monkeypatch.setitem(BACKENDS, "new", BACKENDS["torch"]._replace(refusal=lambda x: "closed"))
    assert "new" not in backends_here()
