"""A row sharded over ranks equals the whole row: outputs, states and every gradient.

All cases of a file run in one world of four processes, because starting processes takes longer than
computing. Each rank reports its errors against the call on the whole row.
"""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_frac.ops import delta_scan, frac_scan
from flash_frac.ops.context_parallel import (
    _SliceSummary,
    sharded_delta_scan,
    sharded_scan,
    window_before,
)
from flash_frac.ops.testing import (
    DeltaInputs,
    ScanInputs,
    random_delta_inputs,
    random_inputs,
    relative_error,
)
from tests.commands import CONTEXT

EXACT = 1e-12  # float64 against float64, relative: a thousand roundings
RANKS = 4
T = 96  # four slices end at 24, 48 and 72, two at 48
DOCUMENTS = {
    "one document": [0, 96],
    "beginning with the slices": [0, 24, 48, 72, 96],
    "beginning just after": [0, 25, 49, 73, 96],
    "beginning just before": [0, 23, 47, 71, 96],
    "over several slices": [0, 10, 80, 96],
    "all kinds, and empty ones": [0, 5, 5, 24, 24, 40, 71, 72, 73, 96],
}


def local_boundaries(documents, start, end):
    """cu_seqlens of the slice from start to end, of documents over the whole row."""
    begins = [b - start for b in documents[:-1] if max(start, 1) <= b < end]
    return torch.tensor([0, *begins, end - start])


def _process(rank, work, folder):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # unwritten memory is NaN
    # Ranks that wait for each other in vain are to fail, and soon.
    patience = timedelta(seconds=60)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=patience
    )
    pairs = [dist.new_group(ranks, timeout=patience) for ranks in ([0, 1], [2, 3])]
    results = work({2: pairs[rank // 2], 4: dist.group.WORLD})
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def run_world(work, folder):
    """What work(groups) gives on each of four ranks; groups are pairs (2) and the world (4)."""
    method = CONTEXT.get_start_method()
    mp.start_processes(_process, (work, str(folder)), nprocs=RANKS, start_method=method)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture
def alone():
    """A group of this process alone, for what needs no second one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# The scan of whole rows and that of slices, by their inputs.
SCANS = {ScanInputs: (frac_scan, sharded_scan), DeltaInputs: (delta_scan, sharded_delta_scan)}


def values(inputs):
    """What a scan reads: (B, T, H, D)."""
    return inputs.v if isinstance(inputs, DeltaInputs) else inputs.u


def functional_weights(inputs):
    generator = torch.Generator().manual_seed(1)
    # Modes, or key channels.
    batch, _, heads, rows = inputs[1].shape
    shapes = (values(inputs).shape, (batch, heads, rows, values(inputs).shape[-1]))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def whole_row(inputs, documents=None, scored=0, backend="auto"):
    """y, the last final state, and the gradients of a functional of both from token `scored` on."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    bounds = None if documents is None else torch.tensor(documents)
    y, final = SCANS[type(inputs)][0](*leaves, cu_seqlens=bounds, backend=backend)
    final = final[-values(inputs).shape[0] :]
    weights = functional_weights(inputs)
    weights[0][:, :scored] = 0
    ((y.double() * weights[0]).sum() + (final.double() * weights[1]).sum()).backward()
    return y.detach(), final.detach(), [x.grad for x in leaves]


def one_slice(group, inputs, documents=None, scored=0, backend="auto"):
    """As `whole_row`, of this rank's slice, and where the slice lies."""
    length, rank = values(inputs).shape[1], group.rank()
    start, end = (length * r // group.size() for r in (rank, rank + 1))
    leaves = [x[:, start:end].clone().requires_grad_() for x in inputs]
    bounds = None if documents is None else local_boundaries(documents, start, end)
    scan = SCANS[type(inputs)][1]
    y, final = scan(*leaves, group=group, cu_seqlens=bounds, backend=backend)
    final = final[-values(inputs).shape[0] :]
    weights = functional_weights(inputs)
    weights[0][:, :scored] = 0
    loss = (y.double() * weights[0][:, start:end]).sum()
    if rank == group.size() - 1:
        loss = loss + (final.double() * weights[1]).sum()
    loss.backward()
    return (y.detach(), final.detach(), [x.grad for x in leaves]), slice(start, end)


def compare(group, inputs, reference=None, **options):
    """Errors of y, the final state (on the last rank) and the gradients of this slice."""
    got, where = one_slice(group, inputs, **options)
    y, final, gradients = whole_row(inputs if reference is None else reference, **options)
    errors = [relative_error(got[0], y[:, where])]
    errors += [relative_error(g, e[:, where]) for g, e in zip(got[2], gradients, strict=True)]
    if where.stop == values(inputs).shape[1]:
        errors.append(relative_error(got[1], final))
    return errors


def rounding(group, dtype, draw=random_inputs):
    """Errors of float32 or bfloat16 slices, relative to those of the whole row in that dtype."""
    exact = draw(2, T, 2, 16, 32, dtype=torch.float64).to(dtype).to(torch.float64)
    errors = compare(group, exact.to(dtype), reference=exact)
    (y, _, gradients), where = whole_row(exact.to(dtype)), one_slice(group, exact)[1]
    exact_y, _, exact_gradients = whole_row(exact)
    pairs = zip([y, *gradients], [exact_y, *exact_gradients], strict=True)
    usual = [relative_error(a[:, where], b[:, where]) for a, b in pairs]
    return [e / u for e, u in zip(errors[: len(usual)], usual, strict=True)]


def traffic(group):
    """Bytes that this rank gives to each collective, as (forward, backward), over their formula."""
    sent, gather, scatter = [], dist.all_gather, dist.reduce_scatter
    dist.all_gather = lambda out, x, group: (sent.append(x.nbytes), gather(out, x, group=group))
    dist.reduce_scatter = lambda out, x, group: (
        sent.append(out.nbytes),
        scatter(out, x, group=group),
    )
    batch, heads, modes, channels, taps = 2, 3, 8, 5, 4
    one_slice(group, random_inputs(batch, T, heads, modes, channels))
    one_slice(group, random_delta_inputs(batch, T, heads, modes, channels))
    x = torch.randn(batch, T, 7, dtype=torch.bfloat16, requires_grad=True)
    window_before(x, taps, group=group).sum().backward()
    dist.all_gather, dist.reduce_scatter = gather, scatter
    state, window = 4 * batch * heads * modes, 2 * batch * 7 * (taps - 1)
    scan, delta = state * (channels + 1), state * (channels + modes)
    return sent, [scan, scan, delta, delta, window, window]


def window_errors(group):
    """window_before against the row itself: the tokens before the slice, zeros before documents."""
    errors = []
    x = torch.randn(1, T, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    start, end = (T * r // group.size() for r in (group.rank(), group.rank() + 1))
    for taps in (1, 2, 4, 9):
        for documents in DOCUMENTS.values():
            bounds = local_boundaries(documents, start, end)
            got = window_before(x[:, start:end], taps, group=group, cu_seqlens=bounds)
            begin = max(b for b in documents[:-1] if b < max(start, 1))
            tokens = range(start - taps + 1, start)
            kept = [x[0, t] if t >= begin else torch.zeros(3) for t in tokens]
            expected = torch.zeros(len(bounds) - 1, 3, taps - 1, dtype=torch.float64)
            if kept:
                expected[0] = torch.stack(kept, 1)
            errors.append(float((got - expected).abs().max()) if taps > 1 else float(got.numel()))
    return errors


def scan_cases(groups):
    inputs = random_inputs(2, T, 2, 16, 5, dtype=torch.float64)
    packed = random_inputs(1, T, 2, 16, 5, dtype=torch.float64, seed=1)
    uneven = random_inputs(1, 37, 1, 4, 3, dtype=torch.float64)
    results = {}
    for n, group in groups.items():
        results[f"rows {n}"] = compare(group, inputs)
        results[f"recurrent {n}"] = compare(group, inputs, backend="recurrent")
        results[f"last token {n}"] = compare(group, inputs, scored=T - 1)
        results[f"uneven {n}"] = compare(group, uneven)
        for name, documents in DOCUMENTS.items():
            results[f"{name} {n}"] = compare(group, packed, documents=documents)
        results[f"windows {n}"] = window_errors(group)
        results[f"float32 {n}"] = rounding(group, torch.float32)
        results[f"bfloat16 {n}"] = rounding(group, torch.bfloat16)
    results["traffic"] = traffic(groups[4])
    return results | delta_cases(groups[4])


def delta_cases(group):
    """The same for the delta rule, where it matters that there are ranks between."""
    inputs, packed = (
        random_delta_inputs(batch, T, 2, 8, 5, dtype=torch.float64) for batch in (2, 1)
    )
    uneven = random_delta_inputs(1, 37, 1, 4, 3, dtype=torch.float64)
    results = {
        "delta rows": compare(group, inputs),
        "delta last token": compare(group, inputs, scored=T - 1),
        "delta uneven": compare(group, uneven, backend="recurrent"),
    }
    for name, documents in DOCUMENTS.items():
        results[f"delta {name}"] = compare(group, packed, documents=documents)
    for dtype in (torch.float32, torch.bfloat16):
        results[f"delta in {dtype}"] = rounding(group, dtype, random_delta_inputs)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_world(scan_cases, tmp_path_factory.mktemp("scan"))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ["rows", "recurrent", "last token", "uneven", *DOCUMENTS])
def test_slices_are_the_whole_row(results, case, ranks):
    for result in results:
        assert all(error < EXACT for error in result[f"{case} {ranks}"])


@pytest.mark.parametrize("case", ["rows", "last token", "uneven", *DOCUMENTS])
def test_slices_of_the_delta_rule_are_the_whole_row(results, case):
    for result in results:
        assert all(error < EXACT for error in result[f"delta {case}"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_windows_are_the_tokens_before(results, ranks):
    assert all(error == 0 for result in results for error in result[f"windows {ranks}"])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_round_as_the_whole_row_does(results, dtype, ranks):
    assert all(ratio < 2 for result in results for ratio in result[f"{dtype} {ranks}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_the_delta_rule_round_as_the_whole_row_does(results, dtype):
    assert all(ratio < 2 for result in results for ratio in result[f"delta in {dtype}"])


def test_traffic_is_what_is_documented(results):
    for result in results:
        sent, expected = result["traffic"]
        assert sent == expected


def test_one_slice_is_the_scan(alone):
    inputs = random_inputs(2, 20, 2, 4, 3)
    y, state = sharded_scan(*inputs, group=alone)
    for got, expected in zip((y, state), frac_scan(*inputs), strict=True):
        assert torch.equal(got, expected)
    delta = random_delta_inputs(2, 20, 2, 4, 3)
    pairs = zip(sharded_delta_scan(*delta, group=alone), delta_scan(*delta), strict=True)
    assert all(torch.equal(got, expected) for got, expected in pairs)


def test_autocast_does_not_touch_the_slices(alone):
    inputs = random_inputs(1, 20, 2, 4, 3)
    summarised = (inputs.u, inputs.write, inputs.log_decay, None)
    (y, state, gradients), summary = one_slice(alone, inputs)[0], _SliceSummary.apply(*summarised)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_summary = one_slice(alone, inputs)[0], _SliceSummary.apply(*summarised)
    pairs = zip((y, state, *gradients, *summary), (*cast[:2], *cast[2], *cast_summary), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_gradients_of_the_summary():
    """By finite differences; a reset slice passes nothing on, and exactly nothing back."""
    u, _, write, log_decay = random_inputs(1, 7, 1, 3, 2, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (u, write, log_decay)]
    for start in (None, torch.tensor(3), torch.tensor(7)):
        assert torch.autograd.gradcheck(lambda *x, s=start: _SliceSummary.apply(*x, s), leaves)
    _, kept = _SliceSummary.apply(*leaves, torch.tensor(3))
    gradients = torch.autograd.grad(kept.sum(), leaves)
    assert not kept.any() and not any(g.any() for g in gradients)


def test_errors_name_the_argument(alone):
    inputs = random_inputs(2, 6, 2, 4, 3)
    with pytest.raises(ValueError, match=r"write must have shape \(2, 6, 2, 4\)"):
        sharded_scan(*inputs[:2], inputs.write[..., :3], inputs.log_decay, group=alone)
    with pytest.raises(ValueError, match="u must hold at least one token; cut the row"):
        sharded_scan(*(x[:, :0] for x in inputs), group=alone)
    delta = random_delta_inputs(2, 6, 2, 4, 3)
    with pytest.raises(ValueError, match="v must hold at least one token; cut the row"):
        sharded_delta_scan(*(x[:, :0] for x in delta), group=alone)
    with pytest.raises(ValueError, match=r"k must have shape \(2, 6, 2, 4\)"):
        sharded_delta_scan(delta.q, delta.k[..., :3], *delta[2:], group=alone)
    with pytest.raises(ValueError, match="cu_seqlens needs one packed row"):
        sharded_scan(*inputs, group=alone, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="group must hold this process"):
        sharded_scan(*inputs, group=dist.GroupMember.NON_GROUP_MEMBER)
    x = torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match="x must hold at least kernel - 1 = 3 tokens, got 2; cut"):
        window_before(x, 4, group=alone)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, I\), got \(1, 2\)"):
        window_before(x[..., 0], 2, group=alone)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 2"):
        window_before(x, 2, group=alone, cu_seqlens=torch.tensor([0, 3]))
