"""Mutants of the C and Cython kernels: where they stand, and one extension that holds them all.

A place is a piece of source text that occurs once in its file, with the edit marked: `total / ⟦D → (D + 1)⟧`. In a
scratch copy of the kernels each marked expression A becomes `(bitnet_ref_mutant == 17 ? (B) : (A))`. The environment
variable BITNET_REF_MUTANT=17 then selects that mutant as the extension is loaded, so all of them cost one build. The
headers that are templates are mutated for every instruction set at once. `python crossval/kernel_mutants.py` builds it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

KERNELS = "bitnet_ref/kernels/cpu"
_MARK = re.compile("⟦(.*?) → (.*?)⟧")
_HEADER = """#ifndef BITNET_REF_MUTANT_H
#define BITNET_REF_MUTANT_H
#include <stdlib.h>
static int bitnet_ref_mutant;
__attribute__((constructor)) static void bitnet_ref_choose_mutant(void) {
    const char *number = getenv("BITNET_REF_MUTANT");
    bitnet_ref_mutant = number ? atoi(number) : 0;
}
#endif
"""

PLACES = {
    "float_steps.h": r"""
        const STEP(f64v) power = STEP_MULADD(root * r[i], p[i], ⟦root → zero⟧);
        return (v[0] + v[2]) + (v[1] + ⟦v[3] → v[2]⟧); }
        return v[0] + ⟦v[1] → v[0]⟧; }
        (STEP(f32v)){b}, (STEP(f32v)){⟦c → 0⟧})[0];
        lowest = zero - ⟦700.0 → 7.0⟧;
        zero - ⟦0.693147180369123816490 → 0.69⟧, x[i])
        TERMS(⟦24.0 → 25.0⟧, 120.0)
        TERMS(⟦2.0 → 4.0⟧, 6.0)
        + ⟦1023 → 1024⟧) << 52
        sums[k] = STEP_MULADD(v, ⟦v → (v * v)⟧, sums[k]);
        total += (double)x[i] * ⟦x[i] → 2 * x[i]⟧;
        const double mean = STEP(sum_of_squares)(x, D) / ⟦(double)D → (double)(D + 1)⟧;
        sqrt(⟦mean + eps → mean⟧);
        y[i] = x[i] / scale * ⟦weight[i] → 1.0f⟧;
        largest_bits = ⟦bits > largest_bits → bits < largest_bits⟧ ? bits
        const float scale = ⟦127.0f → 126.0f⟧ / (largest
        const float v = x[i] * scale + ⟦magic → (magic + 1.0f)⟧;
        *x_quant_scale = ⟦scale → (scale * 1.01f)⟧;
        *x_sum = (int32_t)(sum - ⟦(uint32_t)K → (uint32_t)(K - 1)⟧ * 0x4B400000u);
        const float scale = ⟦w_scale / x_scale → w_scale * x_scale⟧;
        y[i] = (float)acc[i] * scale + ⟦bias[i] → 0.0f⟧;
        y[i] = (float)acc[i] * ⟦scale → -scale⟧;
        STEP(choose)((STEP(i64v))(⟦g[k] < zero → zero < g[k]⟧), e[k], one)
        g[k] < zero), ⟦e[k] → one⟧, one)
        STEP(gated)(y[0], y[⟦1 → 0⟧], rows, r->gate == SILU, y[0]);
        STEP(gated)(y[0], y[1], rows, ⟦r->gate == SILU → r->gate != SILU⟧, y[0]);
        y[n][i] += ⟦r->term[n][m * r->stride + i] → 0.0f⟧;
        y[0][i] += ⟦r->residual[m * r->stride + i] → 0.0f⟧;
        numerator / (one + ⟦e[k] → one⟧)) * u
        if (⟦!is_silu → is_silu⟧) {
        ⟦gate[i] < 0 → gate[i] < 1⟧ ? 0 : gate[i];
        y[i] = ⟦g * g → g⟧ * up[i];
        (one + e[k])) * ⟦u → STEP(narrow)(g[k])⟧;
        first = x[j], second = x[⟦half + j → j⟧];
        y[j] = first * cos[j] - second * ⟦sin[j] → cos[j]⟧;
        y[half + j] = second * cos[j] + ⟦first → second⟧ * sin[j];
        h < ⟦heads → (heads - 1)⟧; h++, x += 2 * half""",
    "attention_steps.h": r"""
        x[i] = (float)((const int8_t *)row)[⟦j + i → j⟧] * scale;
        STEP(widen)((STEP(f32h))_mm256_cvtepi32_ps(q) * ⟦scale → 1.0f⟧);
        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + ⟦2 * j → j⟧))));
        _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(row + ⟦2 * j → j⟧))));
        (float)((const int8_t *)row)[⟦j → 0⟧] * scale;
        STEP(load64)(q + ⟦r → 0⟧ * STEP(DOUBLES));
        j += STEP(DOUBLES), q += ⟦rows → (c->T + c->R - 1)⟧ * STEP(DOUBLES)) {
        totals[n] += q_end[(i + ⟦n / K → 0⟧) * (d % STEP(DOUBLES)) + j % STEP(DOUBLES)] *
        memcpy(c->wide_q + ⟦j * rows → j⟧ + i * STEP(DOUBLES), &v
        c->wide_q[wide * rows + ⟦i → 0⟧ * (d - wide) + j - wide] = q[j];
        STEP(stored_number)(kind, keys[⟦n % K → 0⟧], j
        memcpy(scores + ⟦(n + at) / K → n / K⟧ * n_keys, (const char *)&rounded
        (float)(totals[n] * ⟦c->scale → 1.0⟧);
        largest = ⟦max_lanes[lane] > largest → max_lanes[lane] < largest⟧ ? (float)max_lanes[lane]
        const char *row = rows->at[first + k] + ⟦kv_bytes(kind, j) → 0⟧;
        STEP(widen_rows)(c->kv.kind, rows, ⟦s - block.from → 0⟧, n, 0, d, wide, &near);
        STEP(score_wide)(c, i, keys, &near, ⟦keys.from - s → 0⟧);
        STEP(value_wide)(c, i, keys, &near, keys.from - block.from, j, sums + ⟦i * d → 0⟧);
        for (size_t k = 0; k < 4; k++) sum += ⟦powers[k] → powers[0]⟧;
        sum += ⟦powers[k] → zero⟧;
        last[k] = ⟦-INFINITY → largest⟧;
        const double inverse = 1.0 / ⟦total → (total + 1.0)⟧;
        for (; i < n; i++) p[i] = (float)(p[i] * ⟦inverse → 1.0⟧);
        sum[n] = STEP(load64)(part + ⟦n / C * d → 0⟧ + j
        const char *from = rows->at[⟦first + k → k⟧] + (kind == KV_WIDE ? 0 : kv_bytes(kind, j));
        n * STEP(DOUBLES), rows->scale[⟦first + k → 0⟧]);
        STEP(f64v) p = pattern[r * n_keys + ⟦k → 0⟧] - zero;
        double *to = (part ? part : sums) + ⟦n / C * d → 0⟧ + j
        if (!part) sum[n] += ⟦STEP(load64)(to) → zero⟧;
        STEP(score_tile)(c, kind, i, R, K, ⟦s → keys.from⟧, rows->at + k
        double sum = ⟦part ? part[r * d + j] : 0 → 0⟧;
        else sums[r * d + j] += ⟦sum → 0⟧;
        double *of_rows = sums ? sums + ⟦i * d → 0⟧ : NULL;
        side ? ⟦(kv_range){all.to, block.to} → (kv_range){all.to, all.to}⟧ :
        rows, ⟦keys.from - block.from → 0⟧, of_rows, part + r * d
        of_rows[n] += ⟦part[n] → 0⟧;
        end = n_keys - (c->T - 1 - ⟦t → 0⟧);
        first + end > c->window ? ⟦end - c->window → 0⟧ : 0, end};
        c->q + t * c->q_stride + ⟦i % c->R → 0⟧ * d;
        c->seen[i].to - ⟦c->seen[i].from → c->seen[0].from⟧, c->pattern
        slot = c->slots > 1 ? ⟦b → 0⟧ : 0;
        c->sums[(⟦slot → 1⟧ * rows + i) * d + j];
        z[j] = (float)⟦c->sums[i * d + j] → c->sums[j]⟧;""",
    "training_steps.h": r"""
        (double)D + ⟦eps → 0⟧);
        / ⟦(double)D → (double)(D + 1)⟧ + eps);
        of_weight += ⟦d_n → 2 * d_n⟧;
        sum += ⟦d_n * STEP(wide)(weight + i) → d_n * d_n⟧;
        d_weight[i] += ⟦d_n → 0⟧;
        total += ⟦d_n * weight[i] → 2 * d_n⟧;
        (float)((⟦total → 0⟧ + STEP(sum_lanes)(sum)) / (double)D), by_r
        (dy[i] * ⟦weight[i] → 2⟧ - x[i] * by_r * mean)
        x[i] * by_r * ⟦mean → 0⟧) * by_r;
        x[i] * by_r * mean) * ⟦by_r → 1⟧;
        pattern[i] = (float)(scores[i] * ⟦scale → 1⟧);
        pattern[i] = (float)⟦scores[i] → scores[0]⟧;
        STEP(wide)(d_scores + i) * STEP(wide)(⟦pattern → d_scores⟧ + i);
        total += ⟦(double)d_scores[i] * pattern[i] → 0⟧;
        (d_scores[i] - ⟦mean → 0⟧) * pattern[i] * scale;
        (d_scores[i] - mean) * pattern[i] * ⟦scale → 1⟧;
        g = ⟦gate[i] < 0 → gate[i] < 0.01f⟧ ? 0 : gate[i], d
        d = dy[i] * ⟦g → 1⟧;
        d_gate[i] = d * up[i] * ⟦2 → 1⟧;
        d_up[i] = d * ⟦g → up[i]⟧;
        float x = w[i] * ⟦inverse → 1⟧;
        x = x < -1 ? ⟦-1 → 0⟧ : x;
        x = x > 1 ? ⟦1 → 0⟧ : x;
        (uint8_t)(float_bits(rounded) + ⟦1 → 2⟧);
        values[i] = ⟦rounded - magic → magic - rounded⟧;
        (float)⟦x_q[i] → x_q[0]⟧ / x_quant_scale;
        (float)x_q[i] / ⟦x_quant_scale → 127⟧;
        m[i] * ⟦r.b1 → r.b2⟧ + g[i]
        g[i] * ⟦r.rest1 → r.rest2⟧;
        v[i] * ⟦r.b2 → r.b1⟧ + g[i]
        g[i] * ⟦g[i] → m[i]⟧ * r.rest2;
        g[i] * g[i] * ⟦r.rest2 → r.rest1⟧;
        sqrtf(v[i]) / ⟦r.v_scale → 1⟧ + r.eps;
        / r.v_scale + ⟦r.eps → 1⟧;
        w[i] * ⟦r.keep → 1⟧ - m[i]
        - m[i] * ⟦r.step_size → -r.step_size⟧ / denominator;""",
    "bfloat16_avx512.h": r"""
        data = x.data + (⟦first + i → first⟧) * x.n_stride;
        _mm512_maskz_loadu_ps(⟦2 * p + 1 < K ? here : 0 → 0⟧, low
        row = data + ⟦j → 0⟧ * x.n_stride + 2 * p;
        lines; j++) _mm512_storeu_si512(out + (⟦p + j → j⟧) * width
        _mm512_dpbf16_ps(sum[i][j], columns[j], ⟦row → columns[0]⟧);
        b_here = {b.data + ⟦k * b.k_stride → 0⟧,
        a_here = {a.data + k * a.k_stride + ⟦first * a.n_stride → 0⟧,
        pairs * BF16_A + ⟦m % BF16_A → 0⟧,
        *column = columns + ⟦n * pairs → 0⟧;
        *to = c + (⟦first + m → m⟧) * N + n;
        const int add = ⟦k > 0 → 0⟧;""",
    "kv_cache.h": r"""
        offset = ⟦kv->first + keys.from - page * kv->page_size → 0⟧;
        row = (size_t)kv->pages[⟦page → 0⟧]
        pool->scales[⟦row * kv->scale_stride → 0⟧]
        return (kv_range){⟦a.from > b.from ? a.from : b.from → b.from⟧, a.to
        start > kv->first ? ⟦start - kv->first → 0⟧ : 0
        magnitude = (h & 0x7FFFu) << ⟦13 → 12⟧;
        bits |= (h & ⟦0x8000u → 0u⟧) << 16
        tiny += ⟦0.5f → 0.25f⟧;
        (size - 0x38000000u + ⟦0xFFFu → 0u⟧
        (size >> 13 & ⟦1 → 0⟧)) >> 13;
        (size >> 13 & ⟦1 → 0⟧)) & ~0x1FFFu
        (size >> 16 & ⟦1 → 0⟧)
        (to_half ? ⟦half → brief⟧
        (bits >> 16 & ⟦0x8000u → 0u⟧)
        const float size = fabsf(⟦x[i] → x[0]⟧);
        *scale = largest / ⟦127.0f → 100.0f⟧;
        float v = x[i] / *scale + magic - ⟦magic → (magic + 1)⟧;
        memcpy((float *)rows + row * d, x, ⟦d → (d - 1)⟧ * sizeof(float));
        else kv_int8(x, d, (int8_t *)rows + ⟦row * d → row⟧, scale);""",
    "panel.h": r"""
        swap = (word ^ (word >> ⟦12 → 11⟧))
        copy_mostly(words[r], packed + (first + r) * row_bytes + 4 * ⟦b → 0⟧, bytes, 4 * TILE);
        vector[r] = transpose_codes(words[⟦r → 0⟧][i]);
        memcpy(panel + (b + i) * BLOCK_BYTES + ⟦first / 16 * VECTOR_BYTES → 0⟧, vector,
        memcpy(vector, panel + ⟦(b + i) → i⟧ * BLOCK_BYTES
        copy_mostly(packed + ⟦q * quarter_bytes → 0⟧ + k / 4, bytes[q]
        tokens, x_sum + ⟦m → 0⟧, padded
        padded + ⟦t * PANEL_ROWS → 0⟧, rows""",
    "ternary_scalar.h": r"""
        (codes[i] & 3) * ⟦xb[i] → xb[0]⟧
        (codes[i] >> ⟦4 → 2⟧ & 3)
        sum[r] - ⟦x_sum[m] → 0⟧;""",
    "ternary_avx2.h": r"""
        _mm256_set1_epi32(⟦-x_sum → 0⟧);
        avx2_word(x + b * BLOCK_K + ⟦4 * s → 0⟧);
        memcpy(acc, out, ⟦rows → 1⟧ * sizeof(int32_t));""",
    "ternary_ymm.h": r"""
        acc[m * acc_stride + r] = ⟦-x_sum[m] → 0⟧;
        const uint8_t *bytes = scratch + ⟦row → 0⟧ * 4;""",
    "ternary_avx512.h": r"""
        x2 = avx512_word(xb + ⟦8 → 4⟧)
        int32_t *to = acc + ⟦t → 0⟧ * acc_stride + 16 * q;
        _mm512_set1_epi32(⟦x_sum[t] → 0⟧)
        acc += tokens * acc_stride, x_sum += ⟦tokens → 0⟧;
        _mm512_set1_epi32(⟦-x_sum[m] → 0⟧)
        tokens = ⟦M - m == AVX512_TOKENS + 1 → 0⟧ ? 4""",
    "dense_avx512.h": r"""
        value = ⟦3 → 2⟧ * value + codes[n];
        (256 * value + ⟦242 → 0⟧) / 243
        codes[n] * x[m * x_stride + b * DENSE_BLOCK_K + ⟦4 * n → 0⟧ + i];
        (256u * (uint32_t)⟦x_sum → 0⟧)
        x + start * ⟦DENSE_BLOCK_K → BLOCK_K⟧, x_stride, M""",
    "table_avx2.h": r"""
        panel[i * PANEL_ROWS + r] = packed[r * row_bytes + ⟦i → 0⟧];
        ((nibble & 3) - ⟦1 → 0⟧) * x0
        (uint8_t)(sum >> ⟦5 → 4⟧);
        32 * ⟦table[48 + (byte >> 4)] → 0⟧
        table_add(sum + ⟦32 → 0⟧, n2)
        sum[r] = -(int32_t)(⟦TABLE_BIAS → 255⟧ * TABLE_PAIRS""",
    "dense_rows.h": r"""
        (uint32_t)((const uint16_t *)row)[⟦k → 0⟧] << 16);
        return (v[0] + v[2]) + (v[1] + ⟦v[3] → v[2]⟧);
        STEP(floats)(lanes + i) + STEP(floats)(lanes + ⟦16 + i → i⟧);
        STEP(floats)(x + t * K + ⟦k → pass⟧ + v * STEP(FLOATS)), sum[to]);
        b + r * row_bytes, n, kind, ⟦factors[r] → factors[0]⟧
        of_token += ⟦step → 0⟧;
        STEP(floats)(of_token + ⟦t → 0⟧ * K + column)
        y[i % T * y_stride + i / T] = (four[0] + ⟦four[2] → four[0]⟧)
        four[i] >> (8 * byte + 4 * (part / 4 | ⟦is_high → 0⟧))
        memcpy(to + ⟦sum → c⟧ * 8 * width, &v, sizeof v);
        PACK(0, 0, b + 4, factors + ⟦2 * i → i⟧, factors[2 * i + 1])
        MULTIPLY((K / 32 + 7) / 8 * COLUMNS, ⟦K % 32 → 0⟧)
        return (four[0] + four[2]) + (four[1] + ⟦four[3] → four[1]⟧);
        SUM(third, ⟦fourth → third⟧, 0x44, 0xEE), 0x88, 0xDD)
        y[t * y_stride + r] = STEP(total)(lanes + ⟦(r * T + t) → 0⟧ * 32);
        far, x + k, K, some, ⟦k == 0 → 1⟧, lanes
        packed + ⟦m → 0⟧ * packed_columns(K), K, out, next, pack, lines); break;
        STEP(dense_token)(kind, 1, 2, w + n * row_bytes, far, K, x + ⟦m → 0⟧ * K""",
    "draw_steps.h": r"""
        (STEP(wide)(logits + (i + k) * STEP(DOUBLES)) - top) * ⟦per_temperature → 1.0⟧;
        for (; block + 1 < blocks && below + sums[block] <= target; block++) ⟦below += sums[block] → below += 0⟧;
        const double end = below + ⟦e[i] → e[0]⟧;\n        if (end > target) {
        const double target = ⟦uniform → 0.5⟧ * total
        for (; at > first && ⟦keys[at - 1] < key → 0⟧; at--)
        ends[b + 1] += ⟦ends[b] → 0⟧;
        (logits[start + i] < ⟦below → INFINITY⟧);
        gathered[size++] = (uint32_t)(start + ⟦word → 0⟧ + (size_t)
        is_done = top_k ? ⟦count + 1 → count⟧ == top_k
        if (⟦top_k → 0⟧) total = listed;
        const double beyond = kept - ⟦rule->top_p → 1⟧ * total;
        if (e[keep] < ⟦rule->min_p → 0⟧) break;
        const double target = uniform * ⟦kept → listed⟧;
        STEP(larger_floats)(⟦x[i] → x[0]⟧, x[0]);
        >= -⟦DRAW_DEEPEST → 1⟧ * temperature) {
        STEP(draw_rough)(block, largest, (float)(1 / ⟦temperature → 1.0⟧));
        lowest = zero - ⟦87.0f → 8.7f⟧;
        total += ⟦sums[b] → sums[0]⟧;
        odd[k] += ⟦v[k] - v[k] → zero⟧;
        best = ⟦ends[k] > best → ends[k] < best⟧ ? ends[k] : best;
        while (⟦x[i] != best → 0⟧) i++;""",
    "dense_amx.h": r"""
        part[⟦p * tokens → p⟧ + t] = _mm512_permutex2var_epi16(
        b = _mm512_sub_ps(b, (__m512)_mm512_and_si512((__m512i)⟦b → a⟧, top));
        odd[i] = (uint16_t)(2 * i + ⟦1 → 0⟧);
        lines[i] = part[⟦first + i → i⟧];
        (width < 16 ? (1 << ⟦width → 4⟧) - 1 : 0xFFFF)
        of_group = (const char *)parts + ⟦m / TILE_TOKENS → 0⟧ * group_bytes
        AMX_LOAD(6, ⟦more → w⟧ + k * 64, row);
        _mm512_add_ps(_mm512_loadu_ps(high + ⟦tokens → 0⟧),
        (rows < AMX_ROWS ? (1 << ⟦rows → (rows - 1)⟧) - 1 : 0xFFFF)
        AMX_LOAD(7, ⟦parts + 128 → parts⟧, line);
        y + m * y_stride + n + ⟦r → 0⟧, y_stride);""",
    "blocks_amx.h": r"""
        __m512i by_digit = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, ⟦14 → 10⟧
        *unit = is_finite ? bits_float((exponent - ⟦29 → 28⟧) << 23) : NAN;
        const uint32_t exponent = largest >> 23 < ⟦40 → 126⟧ ? 40 : largest
        _mm512_shuffle_epi8(_mm512_xor_si512(whole[i], ⟦bias → _mm512_setzero_si512()⟧), by_digit);
        _mm_storeu_si128((__m128i *)out->less[0], _mm_slli_epi32(less, ⟦3 → 4⟧));
        _mm_storeu_si128((__m128i *)out->less[1], _mm_slli_epi32(less, ⟦4 → 3⟧));
        _mm_storeu_si128((__m128i *)out->less[2], _mm_slli_epi32(less, ⟦7 → 6⟧));
        (uint16_t)(2 * (i / 4 * 4 + ⟦"\0\2\1\3"[i % 4] → i % 4⟧) + 1);
        p < 3 ? _mm512_sub_epi32(low, _mm512_set1_epi32(⟦128 → 127⟧)) :
        _mm512_set1_ps((float)(1 << ⟦8 * p → 0⟧)));
        if (kind == Q4_1) header->factors[j][1] = (__m512)half_of_avx512(pairs, ⟦1 → 0⟧);
        (__m512)half_of_avx512(v[0] ^ ⟦0x80000000u → 0u⟧, 1);
        PRODUCT(d, (low & 15) | (scale >> 2 & ⟦48 → 16⟧));
        PRODUCT(e, (low >> ⟦4 → 0⟧ & 15) |
        first[i] ^= ⟦0x80808080 → 0x80808000⟧;
        ((i & 1) | (i & 2) << 7 | (i & 4) << 14 | (i & ⟦8 → 0⟧) << 21) << 4;
        _mm512_srli_epi32(bits, ⟦4 * i → 0⟧), table);
        first[i] |= (header->fifth[i] >> ⟦(unsigned)j → 0⟧ & 0x01010101) << 4;
        second[i] |= (header->fifth[i] >> (unsigned)(⟦j + 1 → j⟧) & 0x01010101) << 4;
        const block_token *of = x + ⟦t * stride → 0⟧;
        _mm512_set1_ps((float)(1 << ⟦8 * j → 0⟧)), p);
        y[t] = _mm512_fmadd_ps(factors[1], _mm512_set1_ps(⟦of->sum → 0⟧), y[t]);
        _mm512_mul_ps(factors[0], _mm512_set1_ps(⟦of->unit → x->unit⟧)), p, y[t]);
        header.factors[⟦j + 1 → j⟧], x + k + j + 1, blocks, sums);
        header.factors[j + 1], x + k + j + ⟦1 → 0⟧, blocks, sums);
        NUMBER(⟦24 → 16⟧), NUMBER(8)),
        odd = PAIR(NUMBER(16), NUMBER(⟦0 → 8⟧));
        header->factors[⟦first → 0⟧], sizeof u->to->factors[panel]);
        block_codes(kind, b, u->row, ⟦first + j → j⟧, places, header, codes);
        const block_facts *of = u->facts + ⟦i → 0⟧;
        _mm512_mul_ps(f, _mm512_set1_ps(of->unit[⟦t → 0⟧])), p, y[t]);
        y[t] = _mm512_fmadd_ps(g, _mm512_set1_ps(of->sum[⟦t → 0⟧]), y[t]);
        AMX_LOAD(7, u->weights->weights[⟦1 → 0⟧][i], VECTOR_BYTES);
        u->facts = facts + ⟦m / TILE_TOKENS → 0⟧ * blocks + k;
        if (⟦g || k → k⟧) block_add(kind, T, panels, units""",
    "dense_blocks.h": r"""
        STEP(signed_bytes)(b + 2 + i)) * ⟦f[0] → f[1]⟧
        b + 4 + ⟦i % 16 → 0⟧, i / 16
        kind == Q4_K ? ⟦32 → 0⟧ : 0)
        f[i / 32], f[8 + ⟦i / 32 → 0⟧]
        f[⟦i / 16 → 0⟧];
        _mm256_setr_epi32(0, 5, 10, 15, 16, 21, 26, ⟦31 → 30⟧)
        _mm_setr_epi16(0, 9, 18, 27, 36, 45, 54, ⟦63 → 62⟧)
        _mm_setr_epi16(0, 17, 34, ⟦51 → 50⟧, 0, 0, 0, 0)
        _mm512_srlv_epi16(pairs, ⟦down → up⟧)
        FOURS(0, ⟦48 → 32⟧, 0, 48)
        ((at & 32 ? ⟦pairs >> 2 → pairs⟧ : pairs) & 48)
        (first >> ⟦6 → 4⟧ & 0x03030303) << 4
        if (⟦is_high → 0⟧) q >>= 4
        _mm256_mask_sub_epi8(low, ⟦~bits → bits⟧, low
        _mm256_andnot_si256(⟦_mm256_cmpeq_epi8(bits, bit) → bits⟧
        ((some)⟦(is_set == 0) → (is_set != 0)⟧ & 0xF0)
        of_q5_0 = _mm_setr_epi16(0, 11, 22, ⟦53 → 52⟧, 0, 0, 0, 0)
        _mm512_mask_add_epi8(nibbles, ⟦is_set → 0⟧, nibbles
        ((fifth >> (⟦bit + 1 → bit⟧) & 1) << 4)
        f[0] - (STEP(f32v)){0}, ⟦f[8] → f[0]⟧""",
    "head_screen.h": r"""
        q[k + i] = (int8_t)(int32_t)⟦n[i] → 0⟧;
        r_squares[j] += ⟦r * r → 0⟧;
        facts[0] = ⟦s → 2 * s⟧;
        facts[2] = (float)((⟦w_norm → 0⟧ + r_norm)
        X[k] = (int16_t)(⟦n > 32639 → n > 3263⟧
        e2 += ⟦e * e → 0⟧;
        facts[0] = ⟦t → 2 * t⟧;
        facts[1] = ⟦sqrt(x2) → 0⟧ * up;
        sum[r] = SCREEN_ADD(sum[r], q + ⟦r → r / 2⟧ * wide + i, x);
        sums[r] += ⟦sum → 0⟧;
        lower[m * stride + n + r] = (float)(⟦estimate - slack → estimate⟧);
        lower[m * stride + n + r] = (float)(⟦estimate - slack → estimate + slack⟧);
        upper[m * stride + n + r] = (float)(⟦estimate + slack → estimate - slack⟧);""",
    "attention_amx.h": r"""
        _mm512_set1_epi8(i ? ⟦-128 → 0⟧ : 0));
        slice_lanes(from - 8 * n, to - 8 * n), x + n * ⟦(ptrdiff_t)stride → 8⟧));
        slice_line(high, times, 0, line + ⟦VECTOR_BYTES → 0⟧, &sums);
        stored_avx512(kind, rows->at[k], j + 8 * ⟦(n) → 0⟧, rows->scale[k])
        A(3) B(3, 0) B(4, ⟦1 → 2⟧)
        score_again(c, i + r, (size_t)(s + ⟦__builtin_ctz(left) → 0⟧));
        _mm512_add_pd(_mm512_add_pd(total, sums[0]), ⟦sums[1] → sums[0]⟧);
        (size_t)(to < n ? to : ⟦n → 16⟧);
        offset = c->kv.first - ⟦slices->kv.first → c->kv.first⟧;
        bounds[r] += ⟦more[r] → 0⟧;""",
    "screen_avx512.h": r"""
        _mm512_sub_pd(estimate, ⟦slack → c->ulps⟧)
        _mm512_add_pd(estimate, ⟦slack → _mm512_sub_pd(c->ulps, slack)⟧)
        _mm256_set_pd(facts[9 + i], ⟦facts[6 + i] → facts[i]⟧
        _mm512_srai_epi64(_mm512_slli_epi64(⟦ab → a⟧, 32), 32)
        0xF0, _mm512_set1_pd(x_facts[3 * ⟦u → t⟧ + i])
        _mm_storeu_ps(lower + ⟦u → t⟧ * stride, _mm256_extractf128_ps(low""",
    "_cpu.pyx": r"""
        for i in range(⟦self.count → self.count - 1⟧):\n            if self.calls[i].run
        any(⟦start <= address < end → start <= address⟧ for start""",
    "greedy.h": r"""
        ((const uint16_t *)row)[i] << ⟦16 → 15⟧);""",
    "_cpu_greedy.pxi": r"""
        if not (step.run() and ⟦head.run() → True⟧)
        memcpy(&states[s, i, 0], &hidden[⟦i → 0⟧, 0]
        values[s - 1, i] = logits[⟦i → 0⟧, tokens
        embedding + ⟦tokens[s - 1, i] → 0⟧ * row_bytes
        positions[i] += ⟦1 → 0⟧
        drawn[i] = draw_rule(rules[i, 0], ⟦rules[i, 2] → 1.0⟧, rules[i, 3]
        chosen.draw(&logits[⟦i → 0⟧, 0], V, &drawn[i]
        &drawn[i], uniforms[s, ⟦i → 0⟧], sums
        &full[⟦j → 0⟧, positions[i], 0]""",
    "_cpu_ternary.pxi": r"""
        &packed[p * PANEL_ROWS, 0], ⟦count → count - 1⟧, row_bytes, &panels[p, 0]
        c.panels[i + n] + ⟦p → 0⟧ * n_blocks * BLOCK_BYTES
        x + ⟦block → 0⟧ * x_stride, x_stride, tokens
        x_sum + ⟦block → 0⟧, acc + n
        acc + ⟦n * tokens * PANEL_ROWS → 0⟧, PANEL_ROWS
        r.w_scale[n] = c.scales[⟦i + n → i⟧]
        r.x_scale = x_quant_scale + ⟦block → 0⟧
        r.bias[n] = c.biases[i + n] + ⟦row → 0⟧ if c.biases
        r.term[n] = c.terms[i + n].y + ⟦block * r.stride → 0⟧ + row
        r.residual = c.residual + ⟦block * r.stride → 0⟧ + row
        r.residual = c.residual + block * r.stride + ⟦row → 0⟧ if c.residual
        c.chosen.rms_norm(row, c.norm_weight, K, ⟦c.eps → 1.0⟧, place)
        c.chosen.quantize(row, K, x_q + m * wide, x_quant_scale + ⟦m → 0⟧, x_sum + m)""",
    "_cpu_cache.pxi": r"""
        return window if window and ⟦window <= position → window < position⟧ else position + 1
        t.chosen.rope(x, heads, d // 2, t.cos + ⟦m * (d // 2) → 0⟧, t.sin
        page_table[c.to.slots[m] * c.to.table_columns + ⟦c.to.positions[m] // page_size → 0⟧] * page_size
        row = (row + ⟦c.to.positions[m] % page_size → 0⟧) * <Py_ssize_t> c.to.view.scale_stride
        store_row(c.to.view.kind, ⟦k + g * d → v + g * d⟧, d, &c.to.view.keys, row + g * c.to.head_rows)
        store_row(c.to.view.kind, v + ⟦g * d → 0⟧, d, &c.to.view.values, row + g * c.to.head_rows)
        &c.to.view.values, row + ⟦g → 0⟧ * c.to.head_rows)
        c.of.slots[m] == c.of.slots[m - 1] and c.of.positions[m] == c.of.positions[m - 1] + ⟦1 → 2⟧
        part.q, part.z = c.q + ⟦first → 0⟧ * c.H * c.of.d, c.z
        c.chosen.slice_chunk(slices + ⟦g → 0⟧, item)
        set_run(c, runs * G - divided + ⟦item → 0⟧, runs
        ATTEND_SCORES, ⟦item % pieces → 0⟧, pieces)
        call.z, call.z_stride = c.z + (m * H + ⟦g * call.R → g⟧) * d
        call.window, call.scale = c.window, (<double> d) ** ⟦-0.5 → -0.25⟧
        rotate(&c.of_q, call.q + t * H * d, ⟦m + t → m⟧, call.R
        kv.values.rows = <const char *> kv.values.rows + ⟦rows → 0⟧ * c.of.d * size
        kv.keys.scales += ⟦rows → 0⟧
        kv.pages = c.of.page_table + ⟦c.of.slots[m[0]] → 0⟧ * c.of.table_columns
        kv.first = position + 1 - visible_keys(position, ⟦c.window → 0⟧)
        kv.n_keys = position + ⟦tokens → 1⟧ - kv.first
        call.window, call.scale = ⟦c.window → 0⟧,""",
    "_cpu_dense.pxi": r"""
        c.ys[i] + ⟦first → 0⟧, N, wide)
        c.ws[i] + ⟦first → 0⟧ * row_bytes, stop - first, K, tokens
        first, stop = max(at, <Py_ssize_t> 0) * ⟦DENSE_UNIT → 16⟧, min(
        at, end = at - units_of(⟦N → c.n_out[0]⟧), end
        c.chosen.tiles[i].split(c.x, M, K, ⟦m → 0⟧, parts[i])
        tiles.multiply(c.kinds[i], c.ws[i] + ⟦first → 0⟧ * row_bytes, whole
        of_method = stop // 16 * 16, parts[⟦tiles - c.chosen.tiles → 0⟧]
        parts[1] = parts[0] + ⟦bytes[0] → 0⟧
        last_rows + ⟦i → 0⟧ * 16 * K * 2, stop
        gather_16(c.ws[i] + ⟦(N - N % 16) → 0⟧ * part
        gather_16(first, &rows[⟦i * 16 → 0⟧], some
        tokens + ⟦m → 0⟧ * wide, token_facts
        &facts[⟦block * 64 → 0⟧, 0]
        first + ⟦rows[i] → i⟧ * size""",
    "_cpu_training.pxi": r"""
        chosen.norm_backward(&dy[m, 0], &x[⟦m → 0⟧, 0], &weight[0]
        &weight[0], D, eps, &dx[⟦m → 0⟧, 0], sums)
        d_weight[m] = <float> ⟦sums[m] → 0⟧
        high = start + ⟦q → 0⟧ - first + 1
        high - ⟦window → (window - 1)⟧) if window
        high - low, ⟦scale → 1⟧, &pattern
        &pattern[h, ⟦q → 0⟧, low])
        for i in range(⟦high → K⟧, K)
        chosen.softmax_backward(&d_scores[⟦h → 0⟧, q, 0], &pattern
        &pattern[h, ⟦q → 0⟧, 0], K, scale)
        &up[0, 0], ⟦M * F → F⟧, &d_gate
        K, ⟦1 / w_dequant_scale → 1⟧, codes, &values
        codes[4 * j + 1] << ⟦2 → 4⟧ |
        codes, &values[⟦n → 0⟧, 0])
        x_quant_scale[⟦m → 0⟧, 0], &x[m, 0])
        chosen.sum_of_squares(&x[0], ⟦N → N // 2⟧)
        b1, 1 - b1, b2, ⟦1 - b2 → 1 - b1⟧
        &v[0], ⟦N → N // 2⟧, &rates)""",
    "_cpu_rows.pxi": r"""
        c.chosen.rms_norm(c.x + ⟦m * c.D → 0⟧, c.y
        c.chosen.gated(c.x + start, c.y + ⟦start → 0⟧, min(
        z[i] = x[i] + ⟦y[i] → 0⟧
        add_arrays(c.x + m * c.D, c.y + m * ⟦c.y_stride → c.D⟧, c.D
        cos = c.y + ⟦m * half → 0⟧
        c.x + start + h * size + ⟦2 * half → half⟧, (""",
    "ruled_steps.h": r"""
        acc += (w >> 8 * j & 255) * (int32_t)(int8_t)((uint32_t)x >> 8 * ⟦j → 0⟧);
        acc + (int16_t)x[0] * ((w << 16) >> 16) + (int16_t)x[⟦1 → 0⟧] * (w >> 16);
        _mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(⟦pair → (pair & 0xFFFF)⟧));
        _mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(⟦pair → (pair & 0xFFFF)⟧));
        (STEP(i32v))(⟦is_signed → !is_signed⟧ ? _mm256_cvtepi8_epi16(twice)
        return ⟦is_signed → !is_signed⟧ ? STEP(signed_bytes)(p) : STEP(bytes)(p);
        return total + acc * ⟦scales → ((STEP(i32v)){0} + 1)⟧;
        largest = (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(four, ⟦_mm_shuffle_epi32(four, 0xB1) → four⟧));
        const uint32_t bits = float_bits(x[⟦j → 0⟧]) & 0x7FFFFFFFu;
        v[j] = (int32_t)(⟦x[j] * scale + magic - magic → x[j] * scale⟧);
        sums[⟦j / 16 → 0⟧] = (int16_t)sum;
        (all, ⟦_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7) → _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)⟧);
        sums[1] = (int16_t)(_mm256_extract_epi16(all, 8) - ⟦16 * 128 → 15 * 128⟧);
        scale = ⟦127 → 126⟧ / a;
        *dx = ⟦STEP(as_half)(d) → d⟧;
        scale = ⟦-127 → -126⟧ / x[at];
        const float of_q = ⟦d → *dx⟧ * (float)
        (float)(sums[k / 16] + ⟦sums[k / 16 + 1] → 0⟧);
        scales + 2 * ⟦part → 0⟧ * 16 + v * STEP(FLOATS);
        second *= STEP(signed_bytes)(two + ⟦16 → 0⟧);
        STEP(bytes)(mins + ⟦part → 0⟧ * 16 + v
        sums += ⟦k / 16 → 0⟧ + (size_t)(2 * part);
        sums += k / 16 + (size_t)⟦(2 * part) → 0⟧;
        f.scaled == 16 ? 2 * part + ⟦g / 4 → 0⟧ : part;
        (f.bits == 8 ? g : f.bits == 4 ? ⟦g % 4 → 0⟧ : g % 2) * 64
        (f.bits == 8 ? g : f.bits == 4 ? g % 4 : ⟦g % 2 → 0⟧) * 64
        (g / 4 ? ⟦w[v] >> 4 → w[v]⟧ : w[v]) & 0x0F0F0F0F;
        (w[v] >> 2 * ⟦(g / 2) → 0⟧) & 0x03030303;
        (STEP(u8v))w[v] - (uint8_t)⟦f.offset → 31⟧);
        token_bytes + k + ⟦part * 32 → 0⟧ + g * 4, sizeof x);
        STEP(ruled_add)(total[i], acc[i], s[⟦i % V → 0⟧], !f.scaled);
        (size_t)(lane + v * STEP(FLOATS)) + (f.term ? ⟦16 → 0⟧ : 0), 2);
        d[v] = STEP(weights)(unit + codes, (size_t)⟦(lane + v * STEP(FLOATS)) → lane⟧, 2);
        const float scale = dx[⟦k / (size_t)f.block → 0⟧];
        u[i] += e[i % V] * dx[K / 16 + ⟦k / 32 → 0⟧];
        e[i % V] * scale * STEP(to_floats)(⟦minima[i] → total[i]⟧);
        if (f.term) t[i] += ⟦u[i] → (STEP(f32v)){0}⟧;
        memcpy(y + i / V * RULED_ROWS + lane + ⟦i % V → 0⟧ * STEP(FLOATS), &t[i]
        const uint8_t *some = tokens + ⟦m → 0⟧ * token_bytes;
        copy_mostly(y + m * y_stride, out + ⟦i → 0⟧ * RULED_ROWS""",
    "_cpu_ruled.pxi": r"""
        cdef const float *x = c.x + ⟦m * c.K → 0⟧
        if not c.chosen.rms_norm(x, c.norm_weight, c.K, ⟦c.eps → 1.0⟧, normed)
        y = c.ys[i] + ⟦row → 0⟧
        tokens + (<size_t> ⟦i → 0⟧ * token_bytes if c.apart else 0)
        add_arrays(c.residual + m * c.n_out[i] + ⟦row → 0⟧, y + m
        tokens + ⟦m → 0⟧ * token_bytes, token_bytes,\n                                 some
        some, rows, both[⟦n → 0⟧], RULED_ROWS)
        some * RULED_ROWS, ⟦c.gate == SILU → 0⟧, both[0])
        memcpy(y + ⟦(m + n) → n⟧ * c.n_out[0], both[0]
        memcpy(y + (m + n) * c.n_out[0], both[0] + ⟦n → 0⟧ * RULED_ROWS""",
    "group.h": r"""
        start = first + ⟦c % s->per_group → 0⟧ * s->chunk;
        four[0] | four[1] << 2 | four[2] << 4 | ⟦four[3] << 6 → 0⟧;
        (row[3 * i] + 3 * row[3 * i + 1] + ⟦9 → 6⟧ * row[3 * i + 2]);
        t[0] | t[1] << 5 | ⟦t[2] << 10 → 0⟧, word
        + r % PANEL_ROWS] = index[⟦TRIPLES_PER_WORD * s->words + i → i⟧];
        code = *plane_byte(codes, s, r, k) >> 2 * ⟦(k % BLOCK_K / 4) → 0⟧ & 3u;
        byte[0] | (⟦shift > 3 → 0⟧ ? (unsigned)byte[1] << 8 : 0);
        turned[k] = (double)x[order ? order[k] : (int64_t)k] * (double)⟦signs[k] → 1⟧;
        turned[j] = a + b, turned[j + half] = ⟦a - b → b - a⟧;
        turned[k] /= ⟦root → 1⟧;""",
    "group_steps.h": r"""
        return ldexp(1, exponent - ⟦31 → 30⟧);
        const uint32_t carry = ⟦0x808080u → 0⟧ & ((1u << shift) - 1);
        x_sum[plane] = ⟦sum → 0⟧;
        if (turned) memcpy(wide, turned + ⟦start → 0⟧, count
        wide[k] = x[⟦start + k → k⟧];
        ((uint32_t)sums[⟦PANEL_ROWS + r → r⟧] << 16)
        * step * (double)STEP(weight)(scales, ⟦r → 0⟧, kind);
        STEP(group_add)(sums + ⟦t → 0⟧ * GROUP_PLANES * PANEL_ROWS, x->steps[t],
        STEP(group_add)(sums + t * GROUP_PLANES * PANEL_ROWS, x->steps[⟦t → 0⟧],
        (const char *)scales + (⟦c → 0⟧ * s->rows + r) * size, kind, acc
        (const char *)scales + (c * s->rows + ⟦r → 0⟧) * size, kind, acc""",
    "group_avx512.h": r"""
        lanes[i] = c == 0 ? 4 + d : c == 2 ? d : ⟦8 → d⟧;
        _mm512_mask_sub_epi32(x, ⟦0x0070 → 0x0030⟧, _mm512_setzero_si512(), x);
        (const __m256i *)((const uint16_t *)scales + ⟦r → 0⟧)
        if (⟦f >= 3 → 0⟧) word = _mm512_srli_epi32(word, 16);
        (short)(1 << (16 - 5 * ⟦(f % 3) → 1⟧))
        const int32_t *table = (first_table) + ⟦t → 0⟧ * stride;
        (const __m128i *)codes + ⟦q → 0⟧));
        const __m512d step = _mm512_set1_pd(x->steps[⟦t → 0⟧]);
        16 * q + 8, _mm512_extracti64x4_epi64(⟦sum[4 * t + q] → sum[4 * t]⟧, 1)
        (const char *)scales + (⟦c → 0⟧ * s->rows + r) * size, kind, rows
        (const char *)scales + (c * s->rows + ⟦r → 0⟧) * size, kind, rows""",
    "_cpu_group.pxi": r"""
        &packed[p * rows, 0], ⟦min(rows, N - p * rows) → N - p * rows - 1⟧, row_bytes
        group_unpack_row(&self.shape, &self.panels[⟦ids[i] // rows → 0⟧, 0], ids
        return (c.panels[i] + ⟦row // <Py_ssize_t> shape.rows → 0⟧ * shape.n_chunks
        r = ⟦panel → 0⟧ * shape.n_chunks * shape.rows + row
        own = chunks + ⟦i → 0⟧ * <Py_ssize_t> shape.n_chunks if c.apart
        out = c.ys[i] + (start + ⟦m → 0⟧) * c.n_out[i] + row
        out[r] = <float> acc[⟦m → 0⟧ * stored + r]
        add_arrays(out, c.biases[i] + ⟦row → 0⟧, rows, out)
        chunks[item].steps = steps + ⟦m → 0⟧
        chunks[item].x_sum = x_sum + ⟦m → 0⟧ * GROUP_PLANES
        group_turn(c.x + (start + ⟦m → 0⟧) * K, K
        c.chosen.group_token(&c.shape, c.x + (start + ⟦item % tokens → 0⟧) * K""",
    "_cpu_experts.pxi": r"""
        = stack.kind, stack.n_out, stack.panels[⟦expert → 0⟧], stack.bytes, y
        c.panels[i], c.scales[i] = stack.panels[expert], stack.scales[⟦expert → 0⟧]
        if count == c.k and ⟦p[e] <= p[ids[count - 1]] → p[e] >= p[ids[count - 1]]⟧
        i = count if count < c.k else ⟦count - 1 → 0⟧
        shares[i] = max(p[ids[⟦i → 0⟧]], FLT_MIN)
        shares[i] = shares[i] / ⟦share → 1⟧
        add_expert(&call, &c.up, ids[⟦i → start⟧], up + i * c.F)
        add_share(out + ⟦i → 0⟧ * c.D, c.D, shares[start + i], total)
        add_share(out + i * c.D, c.D, shares[⟦m → 0⟧], totals
        c.h + ⟦places[first[e] + i] // c.k → 0⟧ * c.D
        gate_rows(c, gate, up, ⟦n → 1⟧ * c.F)
        choose_experts(c, c.scores + ⟦i → 0⟧ * c.E""",
    "lora_steps.h": r"""
        bits_float((uint32_t)((const uint16_t *)row)[⟦k + i → k⟧] << 16);
        STEP_MULADD(STEP(wide_weights)(a + ⟦j → 0⟧ * row_bytes, k, kind), v, sums[j]);
        for (size_t i = ⟦k → K⟧; i < K; i++) total +=
        STEP(wide_weight)(a + ⟦j → 0⟧ * row_bytes, i, kind) * x[i];
        for (; n; n--, row += ⟦row_bytes → 0⟧, t++) {
        v = zero + (double)t[⟦j → 0⟧];
        n + ⟦STEP(DOUBLES) → 0⟧, kind), v, two);
        sums[1] += STEP(narrow)(⟦two → one⟧);
        STEP(wide_weight)(b + ⟦j → 0⟧ * row_bytes, n, kind) * t[j];
        y[n] += ⟦(float)sum → 0⟧;""",
    "_cpu_lora.pxi": r"""
        0 if c.choice == NULL else c.choice[⟦m → 0⟧]
        first * c.K * (⟦4 → 2⟧ if f.a_kind == 0 else 2)
        c.K, c.x + ⟦m → 0⟧ * c.K,
        c.t + m * c.max_r + ⟦first → 0⟧)
        c.y[m * c.N + n] = ⟦-0.0 → 1.0⟧
        c.N, first, stop, c.t + ⟦m → 0⟧ * c.max_r, c.y""",
    "strips.h": r"""
        const size_t b = STRIP_BYTES * ⟦v → 0⟧;
        row = v * STRIP_K + ⟦j → 0⟧; s < 4
        int32_t sum = ⟦-x_sum → 0⟧;
        (strip[v * STRIP_BYTES + i] >> 2 * ⟦s → 0⟧ & 3) * x[v
        (size_t)columns[⟦j → 0⟧] * strip_vectors * STRIP_BYTES;
        values[count] = ⟦x[k] → 1⟧, count
        present[count] = ⟦gate[i] → gate[0]⟧, count
        const int32_t *ids = beyond ? list->ahead : list->ids + ⟦first → 0⟧;
        (const __m256i *)(x + v * STRIP_K + 32 * ⟦half → 0⟧);
        _mm_extract_epi32(two, 1) - ⟦x_sum → 0⟧;
        int32_t *to = acc + ⟦half / 2 → 0⟧ * STRIP_K
        avx2_add_8(to + ⟦16 → 8⟧, _mm256_extracti128_si256(low, 1));
        xs = _mm256_set1_epi16(words[⟦f / 2 → 0⟧]);""",
    "strips_avx512.h": r"""
        _mm512_maskz_compress_epi32(needed, ⟦x16 → id⟧)
        _mm512_maskz_compress_ps(needed, ⟦g → _mm512_set1_ps(1.0f)⟧)
        _mm512_and_si512(_mm512_srli_epi16(codes, 4), field), ⟦x2 → x1⟧);
        acc[j + i] = _mm512_reduce_add_epi32(sums[i]) - ⟦x_sum → 0⟧;
        strip_order(acc + 64 * i, 2 * ⟦(i % 4) → 0⟧);
        const __m512i word = _mm512_set1_epi32(words[⟦f / 4 → 0⟧]);
        rows[j + r < count ? ⟦j + r → j⟧ : j] * bytes;
        _mm512_and_si512(codes, field2), ⟦x2 → x1⟧);
        _mm_sub_epi32(four, _mm_set1_epi32(⟦x_sum → 0⟧)));
        last_x[j - fours] = ⟦x[j] → x[0]⟧;
        avx512_word(j < fours ? ⟦x + j → x⟧ : last_x);""",
    "_cpu_strips.pxi": r"""
        c.run(c.panels[which] + ⟦p → 0⟧ * t.n_blocks * BLOCK_BYTES
        add_term(c, which, t.first + m, ⟦p * PANEL_ROWS → 0⟧, rows
        r.needs[i] += not r.gates[⟦m → 0⟧ * r.width + i] <= 0
        t.x + m * t.x_stride, t.x_sum[⟦m → 0⟧], r.own
        c.chosen.dequantize(r.acc, count, c.scales[⟦1 → 0⟧], t.x_quant_scale
        r.up[i] += c.terms[1].y[(t.first + m) * c.n_out[1] + ⟦r.own[i] → i⟧]
        out[⟦r.own[i] → i⟧] = r.up[i]
        acc[i] -= ⟦x_sum → 0⟧
        add_arrays(c.residual + ⟦m → 0⟧ * N + start, out, rows, out)
        joined[k] |= x_q[⟦m → 0⟧ * x_stride + k]
        n.values + (from_token + m) * n.room + ⟦i → 0⟧,
        j - i, acc + ⟦m → 0⟧ * width, n.joined""",
}


def kernel_places() -> list[tuple[str, str, str]]:
    """(file, text, text with the mistake) of every mutant; number n is the n-th, from 1 on."""
    return [(file, *(_MARK.sub(rf"\{side}", text) for side in (1, 2))) for file, text in _marked_texts()]


def _marked_texts() -> Iterator[tuple[str, str]]:
    for file, text in PLACES.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            yield file, line.replace(r"\n", "\n")


def build(root: Path) -> Path:
    """The extension with every mutant, built from a scratch copy. An unchanged one is kept.

    Its flags are setup.py's, but -O1: the same float32 in half of the time.
    Raises LookupError for a place whose text does not occur exactly once.
    """
    texts = _edited(root / KERNELS)
    content = "".join(texts[name] for name in sorted(texts)) + (root / "setup.py").read_text() + sys.version + "-O1"
    folder = Path(tempfile.gettempdir(), f"bitnet_ref_mutants_{hashlib.sha256(content.encode()).hexdigest()[:16]}")
    if not (found := sorted(folder.glob(f"{KERNELS}/_cpu.*.so"))):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / KERNELS).mkdir(parents=True)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(root / name, folder)
        optimised = folder / "setup.py"
        optimised.write_text(optimised.read_text().replace('"-O3"', '"-O1"'))
        for name, text in texts.items():
            (folder / KERNELS / name).write_text(text)
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"BITNET_REF_EXTENSION": "required"}, capture_output=True, text=True
        )
        found = sorted(folder.glob(f"{KERNELS}/_cpu.*.so"))
        if done.returncode != 0 or not found:
            raise RuntimeError(f"the extension with the mutants was not built:\n{done.stdout}{done.stderr}")
    return found[0]


def _edited(kernels: Path) -> dict[str, str]:
    """The kernels' sources with every mutant in them, by file name."""
    edits: dict[str, dict[tuple[int, int], str]] = {}  # file -> {span of the expression: what stands there now}
    texts = {
        path.name: path.read_text() for kind in ("*.h", "*.pyx", "*.pxi", "sets_*.c") for path in kernels.glob(kind)
    }
    texts.pop("_types.pxi", None)  # setup.py makes it from the edited ones
    for number, (file, marked) in enumerate(_marked_texts(), 1):
        mark = _MARK.search(marked)
        assert mark is not None, marked
        old, new, context = mark[1], mark[2], _MARK.sub(r"\1", marked)
        if (count := texts[file].count(context)) != 1:
            raise LookupError(f"{file}: the text to mutate occurs {count} times, not once: {context!r}")
        start = texts[file].index(context) + mark.start()
        span = (start, start + len(old))
        now = edits.setdefault(file, {}).get(span, old)
        if file.endswith(".h"):
            edits[file][span] = f"(bitnet_ref_mutant == {number} ? ({new}) : ({now}))"
        else:
            edits[file][span] = f"(({new}) if bitnet_ref_mutant == {number} else ({now}))"
    for file, spans in edits.items():
        text = texts[file]
        for (start, end), now in sorted(spans.items(), reverse=True):
            text = text[:start] + now + text[end:]
        texts[file] = text
    for file in texts:
        if file.endswith(".h"):
            texts[file] = '#include "mutant.h"\n' + texts[file]
    declared = 'cdef extern from "mutant.h" nogil:\n    const int bitnet_ref_mutant\n\n'
    texts["_cpu.pyx"] = texts["_cpu.pyx"].replace("cdef extern from", declared + "cdef extern from", 1)
    return texts | {"mutant.h": _HEADER}


if __name__ == "__main__":  # so that a campaign finds it built
    print(build(Path(__file__).parents[1]))
