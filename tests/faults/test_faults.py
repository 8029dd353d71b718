"""A few trials of each kind, always the same; `make test-faults` runs hundreds with other seeds."""

import multiprocessing

import pytest

from tests.faults import Lost, __main__, trials
from tests.faults.damage import WAYS, damage
from tests.faults.trials import KINDS, Kind, run_trial

SEED = 0


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if row.quick])
def test_nothing_is_lost(kind):
    for number in range(KINDS[kind].quick):
        run_trial(kind, SEED, number)


def test_there_is_a_trial_for_every_writer():
    """Pages are read by people alone."""
    for kind in ("killed", "full disk", "damaged file"):
        named = {name.removeprefix(f"{kind}: ") for name in KINDS if name.startswith(kind)}
        assert named >= set(trials.WRITERS) - {"inspection"}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_changes_a_file(tmp_path, way):
    path = tmp_path / "a"
    path.write_bytes(bytes(range(200)))
    said = damage(trials.random.Random(0), path, (way,))
    assert said == f"{path} {way}"
    assert not path.exists() or path.read_bytes() != bytes(range(200))


def lose(draw, folder):
    raise Lost("all of it")


def keep(draw, folder):
    return "nothing happened"


@pytest.mark.parametrize("losing", [False, True])
def test_losses_are_counted(monkeypatch, capsys, losing):
    kinds = {"kept": Kind(keep, 2, 0), "gone": Kind(lose if losing else keep, 1, 0)}
    monkeypatch.setattr(trials, "KINDS", kinds)
    monkeypatch.setattr(__main__, "KINDS", kinds)
    # Only a copy of this process knows these kinds.
    monkeypatch.setattr(__main__, "CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr("sys.argv", ["faults", "--seed", "7"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed 7 (repeat with: make test-faults SEED=7)"
    assert lines[-1] == ("3 faults, 1 lost (seed 7)" if losing else "3 faults, 0 lost")
    assert ended.value.code == losing
    assert any("gone, number 0" in line for line in lines) == losing
