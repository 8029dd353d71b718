"""The quickstart's figures, from made-up numbers."""

import numpy as np
import pytest

from flash_frac.quickstart.figures import draw_context, draw_loss, draw_memory

LAGS = np.geomspace(1, 1000, 50)
TRAINED = {0: np.stack([LAGS**-0.5, LAGS**-0.7]), 2: LAGS[None] ** -0.9}
UNTRAINED = {number: heads / 2 for number, heads in TRAINED.items()}
DRAWINGS = {
    "loss": (
        lambda path: draw_loss(path, [(1, 5.0), (9, 3.0)], [(9, 3.1)], 3.05),
        ["training", "validation", "trigram", "step", "bits per byte"],
    ),
    "context": (
        lambda path: draw_context(path, {256: 2.125, 1024: 2.0}, 256, 3.05),
        ["2.125", "1,024", "(training)", "trigram 3.050", "bits per byte"],
    ),
    "memory": (
        lambda path: draw_memory(path, LAGS, TRAINED, UNTRAINED),
        ["layer 0", "layer 2", "before training", "tokens ago"],
    ),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_have_their_labels_and_do_not_change_by_themselves(name, tmp_path):
    draw, texts = DRAWINGS[name]
    for copy in ("a.svg", "b.svg"):
        draw(tmp_path / copy)
    content = (tmp_path / "a.svg").read_text()
    assert content == (tmp_path / "b.svg").read_text()
    for text in texts:
        assert text in content
