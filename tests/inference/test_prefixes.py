"""Prefix states: a prompt with a known prefix costs only its new tokens, and states stay intact."""

import logging
import os
import random
import weakref
import zlib

import numpy as np
import pytest
import torch

from flash_frac.inference import storage
from flash_frac.inference.prefixes import PrefixStates, levels, snapshots
from flash_frac.inference.prefixes.levels import DEVICE, DISK, HOST
from flash_frac.inference.state import empty_cache, read_tokens
from flash_frac.inference.storage import fixed_tensors, growing_tensors
from flash_frac.models.buffers import BufferedCache
from flash_frac.models.slot_cache import SlotCache
from tests.models.conftest import make_model
from tests.models.hybrids import KINDS, close, make_kind

PLENTY = 2**24
LEVELS = ("device", "host", "disk")
# Prefix states by folder.
USERS = weakref.WeakValueDictionary()


def make_prefixes(model, tmp_path, budgets=(PLENTY, PLENTY, PLENTY), **options):
    """The last user of the folder, if any, closes it first."""
    device, host, disk = budgets
    folder = tmp_path / "states" if disk else None
    if folder in USERS:
        USERS[folder].close()
    made = PrefixStates(
        device_bytes=device, host_bytes=host, disk_bytes=disk, folder=folder, **options
    )
    USERS[folder] = made
    return made.bind(model)


def only(level):
    """Budgets with which all is kept at one level."""
    return [PLENTY if name == level else 0 for name in LEVELS]


def make_cache(model, rows=3, room=64):
    return SlotCache(empty_cache(model, 1), rows, room)


def read(model, cache, row, ids):
    """Read ids on into a row; logits (V,) of the next token."""
    alone = BufferedCache.cat([cache], [row])
    alone.reserve(len(ids))
    logits = read_tokens(model, alone, torch.tensor([ids]))
    alone.took([len(ids)])
    for mine, new in zip(cache.fixed(), alone.fixed(), strict=True):
        mine[row] = new[0]
    for name, mine in growing_tensors(cache).items():
        mine[row, :, : alone.longest] = growing_tensors(alone)[name][0, :, : alone.longest]
    cache.counts[row] += len(ids)
    return logits[0]


def code(ids):
    """A number that tells a sequence from others."""
    return zlib.crc32(bytes(ids)) % 2**20


def pretend(cache, row, ids):
    """Have a row hold what no model would: numbers that depend on all tokens before."""
    for n, x in enumerate(fixed_tensors(cache).values()):
        x[row] = code(ids) + n
    for n, x in enumerate(growing_tensors(cache).values()):
        for position in range(len(ids)):
            x[row, :, position] = code(ids[: position + 1]) + n
    cache.counts[row] = len(ids)
    cache.lengths[row] = len(ids)


def assert_holds(cache, row, ids):
    """That a row holds, to the bit, what `pretend` writes."""
    assert cache.counts[row] == cache.lengths[row] == len(ids)
    for n, x in enumerate(fixed_tensors(cache).values()):
        assert (x[row] == code(ids) + n).all()
    for n, x in enumerate(growing_tensors(cache).values()):
        for position in range(len(ids)):
            assert (x[row, :, position] == code(ids[: position + 1]) + n).all()


def assert_sound(prefixes):
    """What is counted is what is held, and what is held is of use."""
    nodes = [node for node in prefixes._root.below() if node.parent is not None]
    held = [x for node in nodes for x in (node.state, node.segment) if x is not None]
    for node in nodes:
        assert node.children or node.state is not None
        assert (node.segment is not None) == bool(prefixes._shapes.growing)
        assert not node.gone and node.parent.children[node.tokens[0]] is node
        assert node.begin == node.parent.num_tokens
    levels = prefixes._levels.table
    assert {x for level in levels for x in level.held} == set(held)
    for number, level in enumerate(levels):
        here = [x for x in held if x.level == number]
        if number == DISK:
            sizes = [x.path.stat().st_size for x in here]
            assert all(x.memory is None for x in here)
        else:
            sizes = [x.memory.untyped_storage().nbytes() for x in here]
            assert sizes == [x.nbytes for x in here] and all(x.path is None for x in here)
        assert level.nbytes == sum(sizes) <= level.budget
    stats = prefixes.stats()
    assert stats.snapshots == len(held)
    bytes_held = (stats.device_bytes, stats.host_bytes, stats.disk_bytes)
    assert bytes_held == tuple(level.nbytes for level in levels)
    if prefixes._path is not None:
        files = [x.path for x in held if x.path is not None]
        assert sorted(prefixes._path.glob("*.prefix")) == sorted(files)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_the_whole(kind, level, ids, tmp_path):
    """To the bit with the same cuts; to rounding if all had been read at once."""
    model = make_kind(kind)
    prefixes, cache = make_prefixes(model, tmp_path, only(level)), make_cache(model)
    first = ids[0].tolist()
    assert prefixes.longest(first) is None
    read(model, cache, 1, first[:17])
    assert prefixes.put(first[:17], cache, 1)
    expected = read(model, cache, 1, first[17:])
    # The row that was copied is written on, and the tree has a branch in the middle of an edge.
    other = [*first[:9], *ids[1].tolist()]
    read(model, cache, 0, other)
    assert prefixes.put(other, cache, 0)
    found = prefixes.longest(first)
    assert found is not None and found.num_tokens == 17 and found.logits is None
    found.restore(cache, 2)
    assert torch.equal(read(model, cache, 2, first[17:]), expected)
    close(expected, model(ids[:1]).logits[0, -1])
    assert_sound(prefixes)


@pytest.mark.parametrize("level", LEVELS)
def test_low_precision(level, tmp_path):
    """Tensors of several dtypes in one piece of memory, through each level."""
    model = make_kind("all", torch.bfloat16)
    prefixes, cache = make_prefixes(model, tmp_path, only(level)), make_cache(model)
    every = {**fixed_tensors(cache), **growing_tensors(cache)}
    assert {x.dtype for x in every.values()} == {torch.bfloat16, torch.float32}
    for x in every.values():
        x.normal_()
    cache.counts[0], logits = 5, torch.randn(61, dtype=torch.bfloat16)
    assert prefixes.put([1, 2, 3, 4, 5], cache, 0, logits=logits)
    found = prefixes.longest([1, 2, 3, 4, 5])
    assert found.logits.dtype == torch.float32 and torch.equal(found.logits, logits.float())
    found.restore(cache, 2)
    assert all(torch.equal(x[2], x[0]) for x in fixed_tensors(cache).values())
    assert all(torch.equal(x[2, :, :5], x[0, :, :5]) for x in growing_tensors(cache).values())


def test_nothing_is_shared_with_live_rows(tmp_path):
    model = make_kind("all")
    prefixes, cache = make_prefixes(model, tmp_path), make_cache(model)
    pretend(cache, 0, [5, 6, 7])
    logits = torch.arange(61.0)
    prefixes.put([5, 6, 7], cache, 0, logits=logits)
    found = prefixes.longest([5, 6, 7])
    found.logits.zero_()
    logits.zero_()
    found.restore(cache, 1)
    pretend(cache, 1, [8, 8, 8, 8])
    pretend(cache, 0, [9])
    found = prefixes.longest([5, 6, 7])
    assert torch.equal(found.logits, torch.arange(61.0))
    found.restore(cache, 1)
    assert_holds(cache, 1, [5, 6, 7])
    assert_holds(cache, 0, [9])


@pytest.mark.parametrize("budgets", [(PLENTY, 0, 0), (9, 0, 0), (5, 7, 0), (3, 4, 30), (0, 0, 30)])
@pytest.mark.parametrize("kind", ["mlp", "all", "transformer", "sliding"])
def test_any_order_of_calls(kind, budgets, tmp_path):
    """Beside a dict of all prefixes; budgets are in states of ten tokens."""
    model = make_kind(kind)
    cache, draw = make_cache(model), random.Random(0)
    pretend(cache, 0, range(10))
    unit = make_prefixes(model, tmp_path, (PLENTY, 0, 0))
    unit.put(range(10), cache, 0)
    size = unit.stats().device_bytes
    # A file has a header.
    sizes = [n if n == PLENTY else n * (size + 4096 * (i == DISK)) for i, n in enumerate(budgets)]
    prefixes, known, asked, hits, reused = make_prefixes(model, tmp_path, sizes), {}, 0, 0, 0
    for step in range(250):
        ids = draw.choices(range(2), k=draw.choice([1, 2, 3, 5, 8, 13, 21]))
        if known and draw.random() < 0.4:
            ids = [*draw.choice(list(known)), *ids][:60]
        if draw.random() < 0.5:
            logits = torch.full((61,), float(code(ids))) if draw.random() < 0.5 else None
            pretend(cache, 0, ids)
            kept = prefixes.put(ids, cache, 0, logits=logits)
            assert kept or budgets[0] != PLENTY
            known[tuple(ids)] = logits is not None or known.get(tuple(ids), False)
            pretend(cache, 0, [99])
        else:
            begins = (n for n in range(1, len(ids)) if tuple(ids[:n]) in known)
            best = max(begins, default=0)
            best = len(ids) if known.get(tuple(ids)) else best
            found = prefixes.longest(ids)
            asked, hits = asked + len(ids), hits + (found is not None)
            num = 0 if found is None else found.num_tokens
            reused += num
            assert num == best if budgets[0] == PLENTY else num <= best
            if found is not None:
                assert tuple(ids[:num]) in known
                found.restore(cache, 1)
                assert_holds(cache, 1, ids[:num])
                assert found.logits is None or (found.logits == code(ids[:num])).all()
        if step % 10 == 0:
            assert_sound(prefixes)
    stats = prefixes.stats()
    assert (stats.tokens_asked, stats.tokens_reused, stats.hits) == (asked, reused, hits)
    assert hits > 20 and stats.damaged == 0
    assert (stats.dropped > 0) == (budgets[0] != PLENTY)
    prefixes.clear()
    assert_sound(prefixes)
    assert prefixes.stats().snapshots == 0


def test_least_recently_used(tmp_path):
    """Goes down level by level, and comes up when it is used."""
    model = make_model()
    cache = make_cache(model)
    one = sum(x[0].nbytes for x in fixed_tensors(cache).values())
    prefixes = make_prefixes(model, tmp_path, (2 * one + 100, one, one + 8192))

    def put(token, **options):
        pretend(cache, 0, [token, 1])
        assert prefixes.put([token, 1], cache, 0, **options)

    def levels():
        found = ((int(x.tokens[0]), x.state) for x in prefixes._root.children.values())
        return {token: state.level for token, state in found}

    for token in (3, 4, 5):
        put(token)
    assert levels() == {3: HOST, 4: DEVICE, 5: DEVICE}
    assert prefixes.longest([4, 1, 1]).num_tokens == 2
    put(6)
    assert levels() == {3: DISK, 5: HOST, 4: DEVICE, 6: DEVICE}
    # From a file to the device, for which others make room.
    prefixes.longest([3, 1, 1]).restore(cache, 2)
    assert_holds(cache, 2, [3, 1])
    assert levels() == {3: DEVICE, 6: DEVICE, 4: HOST, 5: DISK}
    # Putting once more is use.
    put(6)
    put(7)
    assert levels() == {6: DEVICE, 7: DEVICE, 3: HOST, 4: DISK}
    stats = prefixes.stats()
    assert (stats.dropped, stats.refused, stats.hits, stats.misses) == (1, 0, 2, 0)
    assert (stats.moved_to_host, stats.moved_to_disk) == (4, 3)
    assert_sound(prefixes)


def test_larger_than_a_level(tmp_path):
    """It goes to the next one; larger than all it is counted, and nothing is evicted for it."""
    model = make_kind("all")
    cache, ids = make_cache(model), list(range(40))
    pretend(cache, 0, ids)
    small, large = (make_prefixes(model, tmp_path, x) for x in ((900, 4000, 0), (900, PLENTY, 0)))
    pretend(cache, 1, ids[:1])
    for prefixes in (small, large):
        assert prefixes.put(ids[:1], cache, 1) == (prefixes is large)
        assert prefixes.put(ids, cache, 0) == (prefixes is large)
        assert_sound(prefixes)
    assert small.stats().refused == 2 and small.stats().snapshots == 0
    assert small.longest(ids) is None
    stats = large.stats()
    assert (stats.refused, stats.dropped, stats.snapshots) == (0, 0, 4)
    assert large.longest([*ids, 1]).num_tokens == 40
    assert make_prefixes(model, tmp_path, (0, 0, 0)).put(ids, cache, 0) is False
    # Two levels that are each too small for it, and hold something smaller.
    model = make_model()
    cache = make_cache(model)
    size = sum(x[0].nbytes for x in fixed_tensors(cache).values())
    prefixes = make_prefixes(model, tmp_path, (size, size, 0))
    pretend(cache, 0, [3])
    assert prefixes.put([3], cache, 0)
    pretend(cache, 0, [4])
    assert not prefixes.put([4], cache, 0, logits=torch.zeros(61))
    assert prefixes.stats().refused == 1 and prefixes.longest([3, 1]) is not None


def test_what_is_used_does_not_make_room_for_itself(tmp_path):
    """A state comes back to the device while its keys and values are the oldest there."""
    model = make_kind("attention")
    cache, short, long = make_cache(model), [3], list(range(4, 33))
    state = sum(x[0].nbytes for x in fixed_tensors(cache).values())
    token = sum(x[0, :, :1].nbytes for x in growing_tensors(cache).values())
    prefixes = make_prefixes(model, tmp_path, (state + 30 * token, state, 0))
    for ids in (short, long):
        pretend(cache, 0, ids)
        assert prefixes.put(ids, cache, 0)
    node = prefixes._root.children[3]
    assert (node.state.level, node.segment.level) == (HOST, DEVICE)
    assert prefixes.longest([3, 1]) is not None
    assert (node.state.level, node.segment.level) == (DEVICE, DEVICE)
    assert prefixes.stats().dropped == 0
    assert_sound(prefixes)


def test_keys_and_values_are_held_once():
    model = make_kind("attention")
    prefixes, cache = PrefixStates(device_bytes=PLENTY).bind(model), make_cache(model)
    state = sum(x[0].nbytes for x in fixed_tensors(cache).values())
    token = sum(x[0, :, :1].nbytes for x in growing_tensors(cache).values())
    system, turns = list(range(20)), [[5], [6, 7, 8], [5, 9]]
    for turn in turns:
        pretend(cache, 0, [*system, *turn])
        prefixes.put([*system, *turn], cache, 0)
    # 20 tokens of the system prompt, and 5, 6 7 8, 9.
    assert prefixes.stats().device_bytes == 3 * state + 25 * token
    assert_sound(prefixes)
    for turn in turns:
        found = prefixes.longest([*system, *turn, 1])
        found.restore(cache, 2)
        assert_holds(cache, 2, [*system, *turn])


def test_a_found_state_survives_its_eviction(tmp_path):
    model = make_kind("all")
    prefixes, cache = make_prefixes(model, tmp_path), make_cache(model)
    pretend(cache, 0, [3, 4, 5])
    prefixes.put([3, 4, 5], cache, 0)
    found = prefixes.longest([3, 4, 5, 6])
    prefixes.clear()
    assert prefixes.longest([3, 4, 5, 6]) is None
    found.restore(cache, 1)
    assert_holds(cache, 1, [3, 4, 5])


def test_a_whole_prompt_needs_logits():
    """Else at least one token is left to read; a later call may add the logits."""
    model = make_model()
    prefixes, cache = PrefixStates(device_bytes=PLENTY).bind(model), make_cache(model)
    pretend(cache, 0, [3, 4])
    prefixes.put([3, 4], cache, 0)
    assert prefixes.longest([3, 4]) is None and prefixes.longest([3]) is None
    assert prefixes.longest([]) is None
    assert prefixes.longest([3, 4, 5]).logits is None
    prefixes.put([3, 4], cache, 0, logits=torch.ones(61))
    prefixes.put([3, 4], cache, 0)
    for ids in (torch.tensor([3, 4]), np.array([3, 4], np.int32), (3, 4), [3, 4, 5]):
        found = prefixes.longest(ids)
        assert found.num_tokens == 2 and torch.equal(found.logits, torch.ones(61))
    assert_sound(prefixes)
    stats = prefixes.stats()
    assert (stats.hits, stats.misses, stats.tokens_asked, stats.tokens_reused) == (5, 3, 15, 10)


def test_wanted():
    """Boundaries, the end, a grid, and where prompts branch."""
    model = make_model()
    prefixes = PrefixStates(device_bytes=PLENTY, spacing=8).bind(model)
    cache, ids = make_cache(model), list(range(20))
    assert prefixes.wanted(ids, 0, [3, 5, 0]) == [3, 5, 8, 16, 20]
    assert prefixes.wanted(ids, 8, [3, 12, 20]) == [12, 16, 20]
    assert prefixes.wanted(ids[:8]) == [8] and prefixes.wanted(ids, 20) == []
    pretend(cache, 0, ids)
    prefixes.put(ids, cache, 0)
    other = [*ids[:11], 60, 60]
    assert prefixes.longest(other) is None
    assert prefixes.wanted(other) == [8, 11, 13]
    for num in (11, 13):
        pretend(cache, 0, other[:num])
        prefixes.put(other[:num], cache, 0)
    assert prefixes.longest([*ids[:11], 59]).num_tokens == 11
    # A branch whose state is gone is wanted again.
    branch = prefixes._root.children[0]
    prefixes._levels.discard(branch.state)
    branch.state, prefixes.spacing = None, None
    assert prefixes.wanted([*ids, 1]) == [11, 20, 21]
    with pytest.raises(ValueError, match=r"boundaries must be between 0 and the 20 tokens of ids"):
        prefixes.wanted(ids, 0, [21])


def saved(model, tmp_path, prompts):
    """A folder with the states of these prompts."""
    prefixes, cache = make_prefixes(model, tmp_path), make_cache(model)
    for ids in prompts:
        pretend(cache, 0, ids)
        assert prefixes.put(ids, cache, 0, logits=torch.full((61,), float(code(ids))))
    prefixes.save()
    assert_sound(prefixes)
    stats = prefixes.stats()
    assert stats.device_bytes == stats.host_bytes == 0 and stats.moved_to_disk == stats.snapshots
    return prefixes


PROMPTS = [[3, 4, 5, 6, 7], [3, 4, 5], [3, 4, 8, 9], [6]]


@pytest.mark.parametrize("kind", ["mlp", "all", "transformer"])
def test_a_later_process(kind, tmp_path):
    """Begins with what the folder holds, as far as its budget allows, and checks what it uses."""
    model = make_kind(kind)
    prefixes = saved(model, tmp_path, PROMPTS)
    (tmp_path / "states" / ".x.prefix.1.saving").write_bytes(b"begun")
    again, cache = make_prefixes(model, tmp_path), make_cache(model)
    assert again.stats().disk_bytes == prefixes.stats().disk_bytes > 0
    assert_sound(again)
    for ids in PROMPTS:
        found = again.longest(ids)
        assert found.num_tokens == len(ids) and (found.logits == code(ids)).all()
        found.restore(cache, 0)
        assert_holds(cache, 0, ids)
    assert again.stats().disk_bytes == 0
    again.save()
    half = again.stats().disk_bytes // 2
    assert 0 < make_prefixes(model, tmp_path, (0, 0, half)).stats().disk_bytes <= half


def test_orphans(tmp_path):
    """Files of keys and values without which, or for which, there is no state: deleted."""
    model = make_kind("all")
    saved(model, tmp_path, [[3, 4, 5, 6], [3, 4, 8]])
    root = next((tmp_path / "states").glob("segment-0-*"))
    root.unlink()
    again = make_prefixes(model, tmp_path)
    assert again.stats().snapshots == 0 and not list((tmp_path / "states").glob("*.prefix"))
    saved(model, tmp_path, [[3, 4, 5, 6], [3, 4, 8]])
    for file in (tmp_path / "states").glob("state-*"):
        file.unlink()
    make_prefixes(model, tmp_path)
    assert not list((tmp_path / "states").glob("*.prefix"))


def damage(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["state", "segment"])
@pytest.mark.parametrize("how", [damage, lambda path: path.write_bytes(b""), lambda x: x.unlink()])
def test_damaged_files_are_never_used(what, how, tmp_path, caplog, monkeypatch):
    """Nor those that are gone, or swapped; shallower states are found instead."""
    monkeypatch.setattr(logging.getLogger("flash_frac.inference"), "propagate", True)
    model, ids = make_kind("all"), [3, 4, 5, 6]
    prefixes, cache = saved(model, tmp_path, [ids[:2], ids, [9]]), make_cache(model)
    node = prefixes._root.children[3].children[5]
    how(getattr(node, what).path)
    with caplog.at_level("WARNING", "flash_frac"):
        found = prefixes.longest(ids)
    assert found.num_tokens == 2 and prefixes.stats().damaged == 1
    assert f"deleting a file of folder {tmp_path / 'states'}" in caplog.text
    found.restore(cache, 0)
    assert_holds(cache, 0, ids[:2])
    assert_sound(prefixes)
    # Where an edge is cut, too.
    prefixes = saved(model, tmp_path / "again", [ids[:2], ids, [9]])
    how(prefixes._root.children[3].children[5].segment.path)
    pretend(cache, 0, [3, 4, 5, 7])
    assert prefixes.put([3, 4, 5, 7], cache, 0)
    assert_sound(prefixes)
    assert prefixes.longest(ids).num_tokens == 2
    prefixes.longest([3, 4, 5, 7, 1]).restore(cache, 1)
    assert_holds(cache, 1, [3, 4, 5, 7])


def test_swapped_and_damaged_files_at_the_start(tmp_path):
    model = make_model()
    prefixes = saved(model, tmp_path, [[3, 4], [5, 6], [7]])
    first, second, third = (prefixes._root.children[n].state.path for n in (3, 5, 7))
    first.write_bytes(second.read_bytes())
    assert prefixes.longest([3, 4, 1]) is None and prefixes.stats().damaged == 1
    third.write_bytes(third.read_bytes()[:50])
    (tmp_path / "states" / "model.safetensors").write_bytes(b"of somebody else")
    again = make_prefixes(model, tmp_path)
    assert again.stats().snapshots == 1 and again.longest([5, 6, 1]).num_tokens == 2
    assert [x.name for x in (tmp_path / "states").glob("[!.]*")] == ["model.safetensors"]


def test_a_full_disk(tmp_path, monkeypatch):
    model = make_kind("all")
    prefixes, cache = make_prefixes(model, tmp_path, only("disk")), make_cache(model)
    pretend(cache, 0, [3, 4, 5])
    assert prefixes.put([3, 4, 5], cache, 0)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(storage, "save_file", full)
    # Cutting an edge writes files as well.
    for ids in ([3, 7], [8]):
        pretend(cache, 0, ids)
        assert not prefixes.put(ids, cache, 0)
        assert_sound(prefixes)


def test_states_of_another_model(tmp_path):
    model = make_model()
    prefixes = saved(model, tmp_path, [[3, 4]])
    problem = r"folder .*states holds prefix states of another model: frac_num_modes is 8 there"
    problem += r" and 4 here \(see state-.*\.prefix\)"
    with pytest.raises(ValueError, match=problem):
        make_prefixes(make_model(frac_num_modes=4), tmp_path)
    assert prefixes.bind(model).longest([3, 4, 5]) is not None
    other = make_kind("all")
    with pytest.raises(ValueError, match="model must be the one whose states are cached, but"):
        prefixes.bind(other)
    cache = make_cache(other)
    cache.counts[0] = 2
    with pytest.raises(ValueError, match="cache must belong to the model whose prefix states"):
        prefixes.put([3, 4], cache, 0)
    with pytest.raises(ValueError, match="cache must belong to the model whose prefix states"):
        prefixes.longest([3, 4, 5]).restore(cache, 0)
    with torch.no_grad():
        model.lm_head.weight += 1
    with pytest.raises(ValueError, match="it has the same shape but other weights"):
        prefixes.bind(model)


def test_bad_input(tmp_path):
    for name in ("device_bytes", "host_bytes", "disk_bytes"):
        with pytest.raises(ValueError, match=f"{name} must be 0 or more, got -1"):
            PrefixStates(**{"device_bytes": 0, name: -1})
    with pytest.raises(
        ValueError, match=r"disk_bytes .* and folder .* belong together, got 5 and None"
    ):
        PrefixStates(device_bytes=0, disk_bytes=5)
    with pytest.raises(ValueError, match="spacing must be None or at least 1, got 0"):
        PrefixStates(device_bytes=0, spacing=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder .*file cannot be written to"):
        PrefixStates(device_bytes=0, disk_bytes=5, folder=tmp_path / "file")
    prefixes, model = PrefixStates(device_bytes=PLENTY), make_kind("all")
    with pytest.raises(ValueError, match=r"need their model first: call bind\(model\)"):
        prefixes.longest([1])
    with pytest.raises(ValueError, match="save needs a folder"):
        prefixes.save()
    prefixes.bind(model)
    for ids in ([[1, 2]], [0.5], "text"):
        with pytest.raises(ValueError, match="ids must be the token ids of one sequence, got"):
            prefixes.longest(ids)
    cache = make_cache(model)
    for ids in ([], [1, 2]):
        with pytest.raises(ValueError, match="the 0 tokens that row 1 has read, and at"):
            prefixes.put(ids, cache, 1)
    pretend(cache, 1, [1, 2])
    prefixes.put([1, 2], cache, 1)
    with pytest.raises(
        ValueError, match=r"room for 2 tokens, but it has 0; build it with a larger size"
    ):
        prefixes.longest([1, 2, 3]).restore(make_cache(model, 1, 0), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_a_gpu(level, ids, tmp_path):
    """Through pinned memory and back, in the stream in which the model runs."""
    model = make_kind("all", torch.bfloat16).cuda()
    prefixes, cache = make_prefixes(model, tmp_path, only(level)), make_cache(model)
    first = ids[0].tolist()
    with torch.inference_mode():
        for n in range(5):
            prompt = [n, *first[:17]]
            cache.clear()
            read(model, cache, 1, prompt)
            assert prefixes.put(prompt, cache, 1)
    expected = read(model, cache, 1, first[17:])
    found = prefixes.longest([4, *first])
    assert found.num_tokens == 18
    found.restore(cache, 2)
    assert torch.equal(read(model, cache, 2, first[17:]), expected)
    if level == "host":
        held = prefixes._levels.table[HOST].held
        assert all(x.memory.is_pinned() for x in held if x.nbytes)
    assert_sound(prefixes)


def test_states_that_a_deeper_one_has_passed_go_first(tmp_path):
    """Of a conversation, the end is continued; where prompts branch, all of them begin."""
    model = make_model()
    cache = make_cache(model)
    one = sum(x[0].nbytes for x in fixed_tensors(cache).values())
    prefixes = make_prefixes(model, tmp_path, (3 * one, 0, 0))
    for ids in ([7], [7, 1], [7, 2], [7, 1, 3], [7, 2, 4]):
        pretend(cache, 0, ids)
        assert prefixes.put(ids, cache, 0)
    found = [prefixes.longest(ids) for ids in ([7, 1, 3, 9], [7, 2, 4, 9], [7, 9])]
    assert [None if x is None else x.num_tokens for x in found] == [3, 3, 1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["mlp", "all", "transformer"])
def test_numbers_that_are_not_finite(kind, level, tmp_path):
    """They are never found nor written to a file, wherever they are, and can be replaced."""
    model = make_kind(kind)
    prefixes, cache = make_prefixes(model, tmp_path, only(level)), make_cache(model)
    for bad, (first, other) in enumerate([([3, 4, 5, 6], [3, 4, 7]), ([8, 9, 10], [8, 9])]):
        pretend(cache, 0, first)
        every = [*cache.stacks, *cache.column_stacks]
        every[-bad][0, 0].view(-1)[0] = (torch.nan, torch.inf)[bad]
        files = {*tmp_path.glob("states/*")}
        prefixes.put(first, cache, 0, logits=torch.zeros(61))
        assert {*tmp_path.glob("states/*")} == files
        # Where an edge is cut, too.
        pretend(cache, 0, other)
        assert prefixes.put(other, cache, 0)
        assert prefixes.longest([*other, 1]).num_tokens == len(other)
        assert prefixes.longest(first) is None or prefixes.longest(first).num_tokens < len(first)
        pretend(cache, 0, first)
        assert prefixes.put(first, cache, 0)
        prefixes.longest([*first, 1]).restore(cache, 1)
        assert_holds(cache, 1, first)
    assert_sound(prefixes)
    if kind == "mlp":
        pretend(cache, 0, [20])
        prefixes.put([20], cache, 0, logits=torch.full((61,), torch.nan))
        assert prefixes.longest([20, 1]) is None


@pytest.mark.parametrize("budgets", [(9, 0, 0), (5, 7, 0), (3, 4, 30), (0, 0, 30)])
@pytest.mark.parametrize("kind", ["mlp", "all", "transformer"])
def test_memory_runs_out(kind, budgets, tmp_path, monkeypatch):
    """At any allocation: what is found is right, and what is counted is what is held."""
    model = make_kind(kind)
    cache, draw = make_cache(model), random.Random(0)
    pretend(cache, 0, range(10))
    unit = make_prefixes(model, tmp_path, (PLENTY, 0, 0))
    unit.put(range(10), cache, 0)
    size = unit.stats().device_bytes
    sizes = [n * (size + 4096 * (i == DISK)) for i, n in enumerate(budgets)]
    prefixes, found = make_prefixes(model, tmp_path, sizes), 0

    def run_out(function):
        def failing(*arguments, **options):
            if draw.random() < 0.1:
                raise torch.OutOfMemoryError("out of memory")
            return function(*arguments, **options)

        return failing

    monkeypatch.setattr(snapshots, "new_memory", run_out(snapshots.new_memory))
    monkeypatch.setattr(levels.Levels, "_moved", run_out(levels.Levels._moved))
    monkeypatch.setattr(levels.Levels, "on_device", run_out(levels.Levels.on_device))
    known = [[1]]
    for _ in range(100):
        ids = [*draw.choice(known), *draw.choices(range(2), k=draw.choice([1, 2, 5]))][:60]
        known = [*known[-5:], ids]
        pretend(cache, 0, ids)
        prefixes.put(ids, cache, 0)
        ids = [*draw.choice(known), 1]
        state = prefixes.longest(ids)
        if state is not None:
            state.restore(cache, 1)
            assert_holds(cache, 1, ids[: state.num_tokens])
            found += 1
        assert_sound(prefixes)
    assert found > 10 and prefixes.stats().refused > 0


def test_host_memory_runs_out(monkeypatch):
    """It raises a RuntimeError of no class of its own."""

    def fail(*arguments, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error: out of memory"):
        snapshots.new_memory([], "cpu", pinned=True)


def test_more_than_is_free(monkeypatch):
    prefixes = PrefixStates(device_bytes=3 * 2**30).bind(make_model())
    prefixes.check_memory()
    monkeypatch.setattr(levels, "free_bytes", lambda device: 2**30)
    with pytest.raises(ValueError, match=r"device_bytes .* at most 1.00 GiB, .* got 3.00 GiB; lo"):
        prefixes.check_memory()


def test_what_a_tensor_takes():
    """On a GPU, PyTorch rounds large ones up to a multiple of 2 MiB."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert levels.allocated(13_800_000, cpu) == 13_800_000
    assert levels.allocated(13_800_000, gpu) == 14 * 2**20 == levels.allocated(14 * 2**20, gpu)
    assert levels.allocated(1000, gpu) == 1000


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [10 * 2**20, 13_800_000, 55_500_001])
def test_what_a_tensor_takes_on_a_gpu(nbytes):
    before = torch.cuda.memory_allocated()
    x = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == levels.allocated(nbytes, x.device)


def test_one_user_of_a_folder_at_a_time(tmp_path):
    """The second is refused until the first closes it, and deletes none of its files."""
    model, options = make_model(), {"device_bytes": 0, "disk_bytes": PLENTY, "folder": tmp_path}
    first, cache = PrefixStates(**options).bind(model), make_cache(model)
    pretend(cache, 0, [3, 4])
    assert first.put([3, 4], cache, 0)
    draft = tmp_path / ".x.prefix.1.saving"
    draft.write_bytes(b"begun")
    with pytest.raises(ValueError, match=rf"folder {tmp_path} is in use by process {os.getpid()}"):
        PrefixStates(**options).bind(model)
    assert draft.exists()
    first.close()
    # A folder of another model is not held.
    with pytest.raises(ValueError, match="prefix states of another model"):
        PrefixStates(**options).bind(make_model(frac_num_modes=4))
    assert PrefixStates(**options).bind(model).longest([3, 4, 1]) is not None
