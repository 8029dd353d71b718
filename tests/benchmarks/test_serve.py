"""The server benchmark: a tiny model, little load, and its numbers from known results."""

from types import SimpleNamespace

import pytest
import serve

from flash_frac.bench.clients import text_of
from flash_frac.bench.rows import read_rows
from flash_frac.bench.serve import SERVE_COLUMNS, SMOKE, Words, make_row, measure, quantile
from flash_frac.bench.servers import words_tokenizer


@pytest.mark.slow
def test_smoke(tmp_path):
    """Two real servers, without and with prefix states, and clients in other processes."""
    pytest.importorskip("uvicorn", reason="pip install 'flash-frac[serve]'")
    out = tmp_path / "serve.csv"
    serve.main(["--smoke", "--servers", "ours", "--out", str(out), "--commit", "abc"])
    rows = read_rows(out, SERVE_COLUMNS)
    assert [row["scenario"] for row in rows] == [
        *["plain"] * len(SMOKE.clients),
        f"beside prompts of {SMOKE.long}",
        "shared prompt, no prefix states",
        "shared prompt",
        f"{SMOKE.conversations} conversations, begun",
        f"{SMOKE.conversations} conversations, continued",
    ]
    for row in rows:
        assert row["commit"] == "abc" and row["torch"] and float(row["held_mib"]) > 0
        assert 0 < float(row["first_ms_p50"]) <= float(row["first_ms_p95"])
        assert 0 <= float(row["between_ms_p50"]) <= float(row["between_ms_p95"])
        assert float(row["tokens_per_s"]) > 0 and int(row["requests"]) >= int(row["clients"])


def result(start, *times, counts=None):
    return {"start": start, "times": list(times), "counts": counts or [1] * len(times)}


def test_numbers_of_a_row():
    server = SimpleNamespace(name="some server", held=lambda: 3 * 2**20)
    results = [result(0.0, 0.1, 0.15, 0.25), result(0.05, 0.35, 0.45, counts=[1, 2])]
    row = make_row(server, "plain", 2, 10, 3, results)
    assert (row["tokens_per_s"], row["held_mib"], row["requests"]) == (13.33, 3, 2)
    assert (row["first_ms_p50"], row["first_ms_p95"]) == (200, 290)
    assert row["between_ms_p50"] == 100
    with pytest.raises(RuntimeError, match=r"answers must have 4 tokens, got \[3, 3\]"):
        make_row(server, "plain", 2, 10, 4, results)
    assert quantile([], 50) is None and quantile([5.0], 95) == 5.0


def test_a_word_is_a_token():
    tokenizer, words = words_tokenizer(50), Words(50)
    text = words(20)
    ids = tokenizer(text).input_ids
    assert len(ids) == 20 and tokenizer.decode(ids) == text and words(20) != text
    assert Words(50)(20) == text


def test_texts_of_events():
    assert text_of({"choices": [{"text": "a"}]}) == "a"
    assert text_of({"choices": [{"delta": {"content": "b"}}]}) == "b"
    assert text_of({"choices": []}) == text_of({"choices": [{"delta": {}}]}) == ""


def test_an_unknown_server_is_refused():
    with pytest.raises(ValueError, match="servers must be among ours, qwen3, sequential, got vllm"):
        next(measure(None, SMOKE, servers=["vllm"]))
