"""Time and memory of prompts read in pieces: the last token should cost the same as the first.

Letters: B batch, T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flash_frac.bench.parts import Sizes
from flash_frac.bench.recording import is_recorded
from flash_frac.bench.subjects import Subject, Way, make_generator, mode_name
from flash_frac.bench.timing import Times, attempt, quantiles, wall_ms
from flash_frac.inference.generator import PIECE
from flash_frac.inference.slots import LONGEST_RECORDED


def growth_rows(subject: Subject, sizes: Sizes, failures: list[str]) -> list[dict]:
    """Rows of longer and longer prompts through one `Generator`, in pieces of PIECE; ours only.

    Prints how far time is from linear in length, and how much memory grows.
    """
    generator = make_generator(subject, failures)
    rows = []
    for num_tokens in sizes.growth if generator else ():
        ids = subject.tokens(1, num_tokens)
        by_graph = is_recorded(subject.model) and min(num_tokens, PIECE) <= LONGEST_RECORDED
        way = Way(subject.label("Generator"), mode_name(by_graph), partial(generator.prefill, ids))
        held = subject.state_bytes(ids[:, : sizes.prompt], failures)
        for times in attempt(way.label, partial(_times, way), failures):
            found = {"tokens": num_tokens, "state_bytes": held}
            rows.append(subject.row(way, "growth", ids, times, **found))
    if len(rows) > 1:
        print(describe_growth(rows), flush=True)
    return rows


def describe_growth(rows: Sequence[dict]) -> str:
    """Deviation from linear time: the tokens/s furthest from those of the shortest prompt."""
    first, last = rows[0], rows[-1]
    change = max((row["tokens_per_s"] / first["tokens_per_s"] - 1 for row in rows), key=abs)
    text = f"growth from {first['T']:,} to {last['T']:,} tokens: linear within {abs(change):.1%}"
    peaks = [row["peak_mib"] for row in rows if row["peak_mib"] is not None]
    return text + (f", peak memory {min(peaks)} to {max(peaks)} MiB" if peaks else "")


def _times(way: Way) -> Times:
    assert way.call is not None
    way.call()
    return quantiles([wall_ms(way.call) for _ in range(3)])
