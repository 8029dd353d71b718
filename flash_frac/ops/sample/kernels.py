"""Kernels that sample a token of each row, with its own settings and without a sort.

    part_kernel       per part of a row: the largest logits and the sum of their exponentials
    threshold_kernel  per row: the largest logit, the log of the sum, the lowest logit to draw
    draw_kernel       per part: the largest logit / temperature + noise that may be drawn
    finish_kernel     per row: its token and log-probability

All rows share the launches, and a program skips what the settings of its row do not need. Every
filter keeps the largest logits, so one threshold replaces them all. A search finds it by narrowing
a range of values, several pivots at a time: each pass moves the ends of the range to logits of the
row, until they meet.
Letters: B batch, V vocabulary, N parts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flash_frac.ops.arithmetic import exp, log

LOWEST = tl.constexpr(-3.4028234663852886e38)
# Logits further below the largest one than this, divided by the temperature, have no weight.
FARTHEST = tl.constexpr(40.0)


class Scratch(NamedTuple):
    """Intermediate results that the kernels pass to each other.

    Attributes:
        parts: (B, 4, N) float32: the largest logit, the sum of exp(logit - largest), the largest
            after the penalty, the largest key of a draw.
        args: (B, 2, N) int32: the tokens of the last two.
        facts: (B, 3) float32: the largest logit after the penalty, the lowest that may be drawn,
            the log of the sum of exponentials (NaN without a distribution).
    """

    parts: Tensor
    args: Tensor
    facts: Tensor


@triton.jit
def penalised(p_logits, p_seen, o_v, m_v, b_penalty):
    """Logits of one row after the repetition penalty, in float32; -inf outside the mask."""
    b_x = tl.load(p_logits + o_v, mask=m_v, other=float("-inf")).to(tl.float32)
    if b_penalty != 1:
        m_seen = tl.load(p_seen + o_v, mask=m_v, other=0) != 0
        b_lowered = tl.where(b_x > 0, tl.div_rn(b_x, b_penalty), b_x * b_penalty)
        b_x = tl.where(m_seen, b_lowered, b_x)
    return b_x


@triton.jit
def first_largest(b_x, o_v, V):
    """The largest value, and its first offset."""
    b_most = tl.max(b_x, 0)
    return b_most, tl.min(tl.where(b_x == b_most, o_v, V), 0)


@triton.jit
def part_kernel(
    p_logits, p_seen, p_set, p_scratch, V, stride_logits, stride_seen,
    WIDTH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """p_logits, p_seen (B, V), rows stride_logits and stride_seen apart; p_set `Fields`, p_scratch
    `Scratch`.
    """
    i_n, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_parts = tl.num_programs(0)
    o_v = i_n * BV + tl.arange(0, BV)
    m_v = o_v < V
    # [BV]
    b_x = tl.load(p_logits + i_row * stride_logits + o_v, mask=m_v, other=float("-inf"))
    b_x = b_x.to(tl.float32)
    b_most = tl.max(b_x, 0)
    # NaN and +inf turn the sum into NaN; -inf adds nothing.
    b_sum = tl.sum(exp(b_x - tl.where(b_most > LOWEST, b_most, 0.0)), 0)
    b_penalty = tl.load(p_set.repetition_penalty + i_row * WIDTH)
    p_row = p_logits + i_row * stride_logits
    b_scores = penalised(p_row, p_seen + i_row * stride_seen, o_v, m_v, b_penalty)
    b_top, i_top = first_largest(b_scores, o_v, V)
    p_part = p_scratch.parts + i_row * 4 * num_parts + i_n
    tl.store(p_part, b_most)
    tl.store(p_part + num_parts, b_sum)
    tl.store(p_part + 2 * num_parts, b_top)
    tl.store(p_scratch.args + i_row * 2 * num_parts + i_n, i_top)


@triton.jit
def measure(
    p_logits, p_seen, V, b_penalty, b_top, b_scale, b_pivots, NP: tl.constexpr, BV: tl.constexpr,
    WEIGHED: tl.constexpr,
):  # fmt: skip
    """Per pivot [NP]: total weight and minimum of the logits >= the pivot, and maximum of the
    others. A weight is exp(scale (logit - top)), or 1.
    """
    # [NP, BV]
    b_sum = tl.zeros([NP, BV], dtype=tl.float32)
    b_least = tl.full([NP, BV], float("inf"), dtype=tl.float32)
    b_most = tl.full([NP, BV], LOWEST, dtype=tl.float32)
    for start in range(0, V, BV):
        o_v = start + tl.arange(0, BV)
        m_v = o_v < V
        b_x = tl.maximum(penalised(p_logits, p_seen, o_v, m_v, b_penalty), LOWEST)
        b_weight = tl.where(m_v, tl.exp((b_x - b_top) * b_scale) if WEIGHED else 1.0, 0.0)
        m_from = b_x[None, :] >= b_pivots[:, None]
        b_sum += tl.where(m_from, b_weight[None, :], 0.0)
        b_least = tl.minimum(b_least, tl.where(m_from, b_x[None, :], float("inf")))
        b_most = tl.maximum(b_most, tl.where(m_from, LOWEST, b_x[None, :]))
    return tl.sum(b_sum, 1), tl.min(b_least, 1), tl.max(b_most, 1)


@triton.jit
def last_to_reach(
    p_logits, p_seen, V, b_penalty, b_top, b_scale, b_low, b_target,
    NP: tl.constexpr, BV: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """The largest logit such that those >= it weigh b_target; those >= b_low weigh enough."""
    b_high = b_top
    b_share = (tl.arange(0, NP) + 1).to(tl.float32) / (NP + 1)
    while b_low < b_high:
        # Above the low end and at most the high one, so that each pass moves an end.
        b_pivots = tl.minimum(b_low * (1 - b_share) + b_high * b_share, b_high)
        b_pivots = tl.where(b_pivots > b_low, b_pivots, b_high)
        b_sum, b_least, b_most = measure(
            p_logits, p_seen, V, b_penalty, b_top, b_scale, b_pivots, NP, BV, WEIGHED
        )
        m_reach = b_sum >= b_target
        b_high = tl.minimum(b_high, tl.min(tl.where(m_reach, b_high, b_most), 0))
        b_low = tl.maximum(b_low, tl.max(tl.where(m_reach, b_least, b_low), 0))
    return b_low


@triton.jit
def lowest_kept(
    p_logits, p_seen, p_set, i_set, V, num_parts, b_penalty, b_top, b_least_top, b_temperature,
    COLDEST: tl.constexpr, NP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The lowest logit of a row that may be drawn, after the penalty and before the temperature.

    b_top is the largest logit, and b_least_top the smallest of the parts' maxima.
    """
    b_temperature = tl.maximum(b_temperature, COLDEST)
    b_scale = tl.div_rn(1.0, b_temperature)
    b_low = tl.full([], LOWEST, dtype=tl.float32)
    i_k = tl.load(p_set.top_k + i_set)
    if (i_k > 0) & (i_k < V):
        # Each part has a logit at least as large as the smallest of the parts' maxima.
        b_low = tl.where(i_k <= num_parts, tl.maximum(b_least_top, LOWEST), LOWEST)
        b_low = last_to_reach(
            p_logits, p_seen, V, b_penalty, b_top, b_scale, b_low, i_k.to(tl.float32), NP, BV, False
        )
    b_share = tl.load(p_set.top_p + i_set)
    if b_share < 1:
        b_low = tl.maximum(b_low, b_top - FARTHEST * b_temperature)
        b_pivots = tl.zeros([NP], dtype=tl.float32) + b_low
        b_sum, b_least, _ = measure(
            p_logits, p_seen, V, b_penalty, b_top, b_scale, b_pivots, NP, BV, True
        )
        b_target = tl.max(b_sum, 0) * b_share
        b_low = last_to_reach(
            p_logits, p_seen, V, b_penalty, b_top, b_scale, tl.min(b_least, 0), b_target,
            NP, BV, True,
        )  # fmt: skip
    b_min = tl.load(p_set.min_p + i_set)
    if b_min > 0:
        b_low = tl.maximum(b_low, b_top + tl.div_rn(log(b_min), b_scale))
    return b_low


@triton.jit
def threshold_kernel(
    p_logits, p_seen, p_set, p_scratch, p_token, V, num_parts, stride_logits, stride_seen,
    WIDTH: tl.constexpr, COLDEST: tl.constexpr,
    NP: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Join the results of `part_kernel`, with its arguments; p_token (B,) gets the argmax."""
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = o_n < num_parts
    p_part = p_scratch.parts + i_row * 4 * num_parts + o_n
    # [BN]
    b_largest = tl.load(p_part, mask=m_n, other=float("-inf"))
    b_sums = tl.load(p_part + num_parts, mask=m_n, other=0.0)
    b_tops = tl.load(p_part + 2 * num_parts, mask=m_n, other=float("-inf"))
    o_tops = tl.load(p_scratch.args + i_row * 2 * num_parts + o_n, mask=m_n, other=0)
    b_most = tl.max(b_largest, 0)
    b_shift = tl.where(b_most > LOWEST, b_most, 0.0)
    b_sum = tl.sum(b_sums * exp(b_largest - b_shift), 0)
    b_top, i_top = first_largest(b_tops, tl.where(m_n, o_tops, V), V)
    m_good = (b_sum > 0) & (b_top >= LOWEST) & (b_top <= -LOWEST)
    b_temperature = tl.load(p_set.temperature + i_row * WIDTH)
    b_low = tl.full([], LOWEST, dtype=tl.float32)
    if m_good & (b_temperature > 0):
        b_low = lowest_kept(
            p_logits + i_row * stride_logits, p_seen + i_row * stride_seen, p_set, i_row * WIDTH, V,
            num_parts, tl.load(p_set.repetition_penalty + i_row * WIDTH), b_top,
            tl.min(tl.where(m_n, b_tops, b_top), 0), b_temperature, COLDEST, NP, BV,
        )  # fmt: skip
    p_fact = p_scratch.facts + i_row * 3
    tl.store(p_fact, b_top)
    tl.store(p_fact + 1, b_low)
    tl.store(p_fact + 2, tl.where(m_good, b_shift + log(b_sum), float("nan")))
    tl.store(p_token + i_row, i_top.to(tl.int64))


@triton.jit
def gumbel(b_word):
    """Gumbel noise from random words; its resolution is finest where it is large."""
    b_uniform = tl.minimum(b_word.to(tl.float32) * 2**-32 + 2**-33, 1 - 2**-24)
    # log(1 - u) = log(v) u / (1 - v) with v = 1 - u rounded, which cancels the rounding error.
    b_rest = 1 - b_uniform
    b_lost = 1 - b_rest
    b_ratio = tl.div_rn(b_uniform, tl.where(b_lost > 0, b_lost, 1.0))
    b_exponential = tl.where(b_lost > 0, -log(b_rest) * b_ratio, b_uniform)
    return -log(b_exponential)


@triton.jit
def draw_kernel(
    p_logits, p_seen, p_set, p_scratch, V, stride_logits, stride_seen,
    WIDTH: tl.constexpr, COLDEST: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Arguments as in `part_kernel`; a part is 4 BW tokens, each with one Philox word."""
    i_n, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_parts, i_set = tl.num_programs(0), i_row * WIDTH
    b_temperature = tl.load(p_set.temperature + i_set)
    b_top = tl.load(p_scratch.facts + i_row * 3)
    b_low = tl.load(p_scratch.facts + i_row * 3 + 1)
    p_part = p_scratch.parts + (i_row * 4 + 2) * num_parts + i_n
    b_best = tl.full([], float("-inf"), dtype=tl.float32)
    i_best = tl.full([], 0, dtype=tl.int32)
    if (b_temperature > 0) & (tl.load(p_part) >= b_low):
        b_scale = tl.div_rn(1.0, tl.maximum(b_temperature, COLDEST))
        b_penalty = tl.load(p_set.repetition_penalty + i_set)
        # Rows of settings hold five words of 64 bits.
        i_drawn = tl.load(p_set.drawn + i_row * (WIDTH // 2))
        i_seed = tl.load(p_set.seed + i_row * (WIDTH // 2))
        o_w = tl.arange(0, BW)
        # [BW]
        o_low = (i_drawn & 0xFFFFFFFF).to(tl.uint32) + tl.zeros([BW], dtype=tl.uint32)
        o_high = (i_drawn >> 32).to(tl.uint32) + tl.zeros([BW], dtype=tl.uint32)
        b_words = tl.philox(
            i_seed, (i_n * BW + o_w).to(tl.uint32), o_low, o_high, tl.zeros([BW], dtype=tl.uint32)
        )
        b_keys = tl.full([BW], float("-inf"), dtype=tl.float32)
        o_keys = tl.full([BW], 0, dtype=tl.int32)
        for i_word in tl.static_range(4):
            o_v = (i_n * 4 + i_word) * BW + o_w
            p_row, p_marks = p_logits + i_row * stride_logits, p_seen + i_row * stride_seen
            b_x = penalised(p_row, p_marks, o_v, o_v < V, b_penalty)
            b_key = (b_x - b_top) * b_scale + gumbel(b_words[i_word])
            m_better = (b_x >= b_low) & (b_key > b_keys)
            b_keys, o_keys = tl.where(m_better, b_key, b_keys), tl.where(m_better, o_v, o_keys)
        b_best, i_best = first_largest(b_keys, o_keys, V)
    tl.store(p_part + num_parts, b_best)
    tl.store(p_scratch.args + (i_row * 2 + 1) * num_parts + i_n, i_best)


@triton.jit
def finish_kernel(
    p_logits, p_seen, p_set, p_scratch, p_token, p_logprob, num_parts, stride_logits, stride_seen,
    V, WIDTH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Arguments as in `part_kernel`; p_token, p_logprob (B,). Marks and counts the token."""
    i_row = tl.program_id(0).to(tl.int64)
    i_token = tl.load(p_token + i_row).to(tl.int32)
    if tl.load(p_set.temperature + i_row * WIDTH) > 0:
        o_n = tl.arange(0, BN)
        m_n = o_n < num_parts
        p_part = p_scratch.parts + (i_row * 4 + 3) * num_parts + o_n
        b_keys = tl.load(p_part, mask=m_n, other=float("-inf"))
        p_arg = p_scratch.args + (i_row * 2 + 1) * num_parts + o_n
        _, i_token = first_largest(b_keys, tl.load(p_arg, mask=m_n, other=0), V)
    b_log_sum = tl.load(p_scratch.facts + i_row * 3 + 2)
    m_good = b_log_sum == b_log_sum
    i_token = i_token.to(tl.int64)
    b_x = tl.load(p_logits + i_row * stride_logits + i_token, mask=m_good, other=0.0)
    tl.store(p_logprob + i_row, b_x.to(tl.float32) - b_log_sum)
    tl.store(p_token + i_row, tl.where(m_good, i_token, -1))
    tl.store(p_seen + i_row * stride_seen + i_token, 1, mask=m_good)
    p_drawn = p_set.drawn + i_row * (WIDTH // 2)
    tl.store(p_drawn, tl.load(p_drawn) + 1)
