/* The ternary product with AMX: one instruction multiplies a tile of 16 tokens x 64 columns by a tile of 64 columns x 16
 * rows: 16,384 int8 products, added by fours into 16 x 16 lanes of int32.
 *
 * Plain version: ternary_scalar.h. Besides on a Sapphire Rapids, where the suite runs it, it ran equal on Bochs 3.0's
 * (tests/kernels/amx_machine.py); elsewhere the suite runs this text over tiles in plain C that check all that Intel's manual
 * asks of a configuration (amx_emulated.h), and looks for the instructions in the built extension.
 *
 * The operands, in the terms of the instruction (C += A B, A signed, B unsigned: tdpbsud):
 *   A  16 tokens, 64 activations each: read from x as it lies, rows x_stride apart.
 *   B  16 lines of 64 bytes; line g holds 4 columns (4g .. 4g+3) of 16 rows, 4 bytes for a row: just what unpacking one
 *      2-bit field of a panel's vector gives. So nothing is shuffled for the tiles.
 *   C  16 tokens x 16 rows: begun at -x_sum, kept in tiles over all columns, written to acc as it lies.
 * Eight tile registers: 2 x 2 sums (32 tokens x 32 rows), 2 of tokens, 2 of rows. A step of 64 columns is 4 loads and 4
 *   products; a product keeps the unit busy for 16 cycles, and its sum comes after 52, so there must be four in turn: 16
 *   tokens or fewer go against all 64 rows (`amx_few`), 5 loads and 4 products.
 * Weights are unpacked while others are multiplied: the unit for tiles leaves the others idle, so after each product comes
 *   a quarter of the unpacking of the step after the next one, into a ring of four steps that stays in L1. For the second
 *   32 rows and for the next 32 tokens it is done again, which costs less than to write it to L2 and read it back.
 * The next panel is fetched meanwhile, by each step its part.
 * The last columns, fewer than 64, are AVX-512's. So is what has up to four tokens, which read panels without unpacking,
 *   and so are the float steps.
 *
 * Measured, one thread of a Sapphire Rapids (part of the 3,690 G multiply-adds/s of tdpbsud alone), 64 rows in L2, microseconds:
 *                              2560 columns                        6912 columns
 *   tokens                  5     16     32     64    128        16     32     64    128
 *   as it is              1.7    2.1    3.4    6.4   12.8       4.6    7.3   14.0   28.7
 *   part of the peak     0.13   0.34   0.42   0.44   0.44      0.42   0.52   0.55   0.53
 *   unpacked before, 1024
 *   columns at a time     6.6    6.9    8.6   11.7   18.3      18.8   22.0   30.0   47.0
 *   Weights from memory (one thread reads 18.5 GB/s of it): 5 to 16 tokens 11 to 12 GB/s, 32 tokens 5.5 us, 64 tokens 7.8.
 * Tried:
 *   - unpacking one step ahead, not two: 30% slower (a tile is loaded when its lines have left the store buffer); three: 0 to
 *     5%; a ring of eight steps: 5%, of 16 tokens, whose steps are twice as large, 50%
 *   - the tokens' next lines fetched into L1, two to eight steps ahead: 5 to 20% slower
 *   - the result's lines fetched before they are stored: 0 to 5% slower
 *   - tokens copied to tiles of 1 KB: 0 to 5% faster, 17% where rows lie 4096 bytes apart. Not taken: every call must copy
 *   - weights fetched into L1, or 2 to 16 KB ahead, not a panel: 0 to 20% slower from memory; not at all: 20 to 25%
 */
#ifndef BITNET_REF_TERNARY_AMX_H
#define BITNET_REF_TERNARY_AMX_H

#include "ternary_avx512.h"

#if defined(__x86_64__) && defined(__linux__)
#define BITNET_REF_HAS_AMX 1

enum { AMX_ROWS = 16, AMX_PAIR = 2 * AMX_ROWS, AMX_TILE_BYTES = 1024, AMX_STEP_BLOCKS = 4, AMX_AHEAD = 2, AMX_RING = 4 };

/* What ldtilecfg reads: palette 1 has 8 tiles of at most 16 rows of at most 64 bytes. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16]; /* bytes in a row, for each tile */
    uint8_t rows[16];
} amx_config;

#if defined(BITNET_REF_AMX_EMULATED)
#include "amx_emulated.h" /* in tests/kernels */
#else
/* Not the compiler's intrinsics: GCC's _tile_loadconfig names 8 of the 64 bytes as its input, and stores to the others
 * may then be dropped. Here the operand is the whole structure, and all that reads or writes tiles is volatile, with
 * memory as an input or output, so the compiler keeps their order. */
static inline void amx_configure(const amx_config *config) { __asm__ volatile("ldtilecfg %0" ::"m"(*config)); }
static inline void amx_release(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#define AMX_LOAD(tile, base, stride)                                                                                   \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"((size_t)(stride)) : "memory")
#define AMX_STORE(tile, base, stride)                                                                                  \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"((size_t)(stride)) : "memory")
#define AMX_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
/* sum += a (signed) b (unsigned) */
#define AMX_DOT(sum, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
/* sum += a (signed) b (signed) */
#define AMX_DOT_SIGNED(sum, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#endif

/* Tiles 0-3: sums, [tokens 0-15 or 16-31][rows 0-15 or 16-31]. 4, 5: those tokens. 6, 7: those rows.
 * With 16 tokens or fewer, 0-3: sums, of all 64 rows. 4: the tokens. 5, 6, 7: rows, in turn. `tokens` of 1 to 32. */
static inline void amx_shape(size_t tokens) {
    amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    const int few = tokens <= AMX_ROWS;
    const size_t first = few ? tokens : AMX_ROWS, second = few ? tokens : tokens - AMX_ROWS;
    for (int tile = 0; tile < 8; tile++) {
        const int is_tokens = tile == 4 || (tile == 5 && !few);
        const size_t rows = tile > 4 && !is_tokens ? AMX_ROWS : tile == 4 || tile < 2 ? first : second;
        config.rows[tile] = (uint8_t)rows;
        config.colsb[tile] = VECTOR_BYTES;
    }
    amx_configure(&config);
}

/* The passes through a panel, as their weights are unpacked: a step of 64 columns AMX_AHEAD steps before it is multiplied,
 * from the end of one pass on into the next. */
typedef struct {
    const uint8_t *panel;
    size_t n_steps, vectors; /* of a pass; of 16 rows in a step, 2 or 4 */
    size_t step, vector;     /* the next step to be unpacked, and its first vector */
    uint8_t *ring;           /* AMX_RING steps, in bytes: `vectors` tiles each */
    size_t slot;             /* of the next step to be multiplied */
    const char *next;        /* the packed columns after this panel, of which each step asks for `ahead` bytes */
    size_t ahead;
} amx_weights;

AVX512_INLINE uint8_t *amx_slot(const amx_weights *w, size_t later) {
    return w->ring + (w->slot + later) % AMX_RING * w->vectors * AMX_TILE_BYTES;
}

/* Where the next step lies; the one after it is next then. */
AVX512_INLINE const uint8_t *amx_from(amx_weights *w) {
    const uint8_t *from = w->panel + w->step * AMX_STEP_BLOCKS * BLOCK_BYTES + w->vector * VECTOR_BYTES;
    if (++w->step == w->n_steps) w->step = 0, w->vector = (w->vector + w->vectors) % 4;
    return from;
}

/* a quarter of a step, 16 columns of all its rows -> 4 lines of each tile */
AVX512_INLINE void amx_unpack(const uint8_t *from, uint8_t *to, size_t block, const size_t vectors) {
    for (size_t v = 0; v < vectors; v++)
        avx512_unpack_vector(from + block * BLOCK_BYTES + v * VECTOR_BYTES,
                             to + v * AMX_TILE_BYTES + block * 4 * VECTOR_BYTES, VECTOR_BYTES);
}

/* From the panel's first step on, of so many vectors each. */
AVX512_INLINE void amx_begin(amx_weights *w, const size_t vectors) {
    w->vectors = vectors, w->step = w->vector = 0;
    for (size_t later = 0; later < AMX_AHEAD; later++) {
        const uint8_t *from = amx_from(w);
        for (size_t block = 0; block < AMX_STEP_BLOCKS; block++) amx_unpack(from, amx_slot(w, later), block, vectors);
    }
}

AVX512_INLINE void amx_fetch(amx_weights *w) {
    for (size_t i = 0; i < w->ahead; i += VECTOR_BYTES) _mm_prefetch(w->next + i, _MM_HINT_T1);
    w->next += w->ahead;
}

/* A pass of 17 to 32 tokens against 32 rows: acc = sums + codes * x. The configuration is theirs.
 * sums (32, 16): where each token's begin. */
AVX512_TARGET static void amx_pair(amx_weights *weights, const int8_t *x, size_t x_stride, const int32_t *sums, int32_t *acc,
                                   size_t acc_stride) {
    const size_t acc_bytes = acc_stride * sizeof *acc;
    const int8_t *x1 = x + AMX_ROWS * x_stride;
    int32_t *acc1 = acc + AMX_ROWS * acc_stride;
    amx_weights w = *weights;
    AMX_LOAD(0, sums, VECTOR_BYTES);
    AMX_LOAD(1, sums, VECTOR_BYTES);
    AMX_LOAD(2, sums + AMX_ROWS * 16, VECTOR_BYTES);
    AMX_LOAD(3, sums + AMX_ROWS * 16, VECTOR_BYTES);
    for (size_t step = 0; step < w.n_steps; step++) {
        const uint8_t *b = amx_slot(&w, 0), *from = amx_from(&w);
        uint8_t *to = amx_slot(&w, AMX_AHEAD);
        amx_fetch(&w);
        AMX_LOAD(4, x + step * VECTOR_BYTES, x_stride);
        AMX_LOAD(6, b, VECTOR_BYTES);
        AMX_DOT(0, 4, 6);
        amx_unpack(from, to, 0, 2);
        AMX_LOAD(7, b + AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(1, 4, 7);
        amx_unpack(from, to, 1, 2);
        AMX_LOAD(5, x1 + step * VECTOR_BYTES, x_stride);
        AMX_DOT(2, 5, 6);
        amx_unpack(from, to, 2, 2);
        AMX_DOT(3, 5, 7);
        amx_unpack(from, to, 3, 2);
        w.slot++;
    }
    AMX_STORE(0, acc, acc_bytes);
    AMX_STORE(1, acc + 16, acc_bytes);
    AMX_STORE(2, acc1, acc_bytes);
    AMX_STORE(3, acc1 + 16, acc_bytes);
    *weights = w;
}

/* A pass of 1 to 16 tokens against all 64 rows, likewise. */
AVX512_TARGET static void amx_few(amx_weights *weights, const int8_t *x, size_t x_stride, const int32_t *sums, int32_t *acc,
                                  size_t acc_stride) {
    const size_t acc_bytes = acc_stride * sizeof *acc;
    amx_weights w = *weights;
    AMX_LOAD(0, sums, VECTOR_BYTES);
    AMX_LOAD(1, sums, VECTOR_BYTES);
    AMX_LOAD(2, sums, VECTOR_BYTES);
    AMX_LOAD(3, sums, VECTOR_BYTES);
    for (size_t step = 0; step < w.n_steps; step++) {
        const uint8_t *b = amx_slot(&w, 0), *from = amx_from(&w);
        uint8_t *to = amx_slot(&w, AMX_AHEAD);
        amx_fetch(&w);
        AMX_LOAD(4, x + step * VECTOR_BYTES, x_stride);
        AMX_LOAD(5, b, VECTOR_BYTES);
        AMX_DOT(0, 4, 5);
        amx_unpack(from, to, 0, 4);
        AMX_LOAD(6, b + AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(1, 4, 6);
        amx_unpack(from, to, 1, 4);
        AMX_LOAD(7, b + 2 * AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(2, 4, 7);
        amx_unpack(from, to, 2, 4);
        AMX_LOAD(5, b + 3 * AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(3, 4, 5);
        amx_unpack(from, to, 3, 4);
        w.slot++;
    }
    AMX_STORE(0, acc, acc_bytes);
    AMX_STORE(1, acc + 16, acc_bytes);
    AMX_STORE(2, acc + 32, acc_bytes);
    AMX_STORE(3, acc + 48, acc_bytes);
    *weights = w;
}

/* Any M. `acc` has all 64 rows. */
AVX512_TARGET static void amx_many(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,
                                   const int32_t *x_sum, int32_t *acc, size_t acc_stride, uint8_t *scratch) {
    const size_t n_steps = n_blocks / AMX_STEP_BLOCKS, left = n_blocks % AMX_STEP_BLOCKS, n_bytes = n_blocks * BLOCK_BYTES;
    const size_t rest = M % AMX_PAIR, passes = M / AMX_PAIR * 2 + (rest + AMX_ROWS - 1) / AMX_ROWS;
    const uint8_t *after = panel + n_bytes;
    int32_t *sums = (int32_t *)(scratch + AMX_RING * 4 * AMX_TILE_BYTES); /* (32, 16) */
    if (n_steps == 0) {
        avx512_many(panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, scratch);
        return;
    }
    amx_weights w = {.panel = panel, .n_steps = n_steps, .ring = scratch, .next = (const char *)after};
    w.ahead = (n_bytes + passes * n_steps - 1) / (passes * n_steps);
    for (size_t m = 0; m < M; m += AMX_PAIR) {
        const size_t tokens = M - m < AMX_PAIR ? M - m : AMX_PAIR;
        const int8_t *xs = x + m * x_stride;
        int32_t *out = acc + m * acc_stride;
        for (size_t t = 0; t < tokens; t++) _mm512_store_si512(sums + 16 * t, _mm512_set1_epi32(-x_sum[m + t]));
        if (m == 0 || tokens < AMX_PAIR) amx_shape(tokens);
        if (tokens <= AMX_ROWS) {
            amx_begin(&w, 4);
            amx_few(&w, xs, x_stride, sums, out, acc_stride);
        } else {
            if (m == 0) amx_begin(&w, 2);
            amx_pair(&w, xs, x_stride, sums, out, acc_stride);
            amx_pair(&w, xs, x_stride, sums, out + 2 * AMX_ROWS, acc_stride);
        }
    }
    amx_release();
    if (left) {
        avx512_unpack(panel + n_steps * AMX_STEP_BLOCKS * BLOCK_BYTES, left, scratch);
        avx512_tiles(scratch, 4 * left, x + n_steps * VECTOR_BYTES, x_stride, M, after, acc, acc_stride);
    }
}

AVX512_TARGET static void ternary_panel_amx(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride,
                                            size_t M, const int32_t *x_sum, int32_t *acc, size_t acc_stride, size_t rows,
                                            void *scratch) {
    if (M <= AVX512_FEW_TOKENS) {
        ternary_panel_avx512(panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, rows, scratch);
    } else {
        ternary_by_way_of_64_rows(amx_many, panel, n_blocks, x, x_stride, M, x_sum, acc, acc_stride, rows, scratch);
    }
}

#if !defined(BITNET_REF_AMX_EMULATED)
#include <cpuid.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* NULL when this process may use the tiles. The Linux kernel gives their 8 KB of state only to a process that asks: once,
 * for all threads, those to come, and children that are forked. Not where a thread's signal stack could not hold them. */
static const char *amx_lacks(void) {
#if !defined(BITNET_REF_AMX_EMULATED)
    enum { OSXSAVE = 1 << 27, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25, XCR0_TILES = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM, the state's number */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_TILE | AMX_INT8)) != (AMX_TILE | AMX_INT8))
        return "the processor has no AMX with int8";
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return "the operating system does not save AMX tiles";
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a & XCR0_TILES) != XCR0_TILES) return "the operating system does not save AMX tiles";
    /* tile palette 1, as this file has it: 8 tiles (b >> 16) of 1024 bytes (a >> 16), 64 bytes (b) by 16 rows (c) */
    if (!__get_cpuid_count(0x1D, 1, &a, &b, &c, &d) || a >> 16 != 1024 || b != (8u << 16 | 64) || (c & 0xFFFF) != 16)
        return "the processor's AMX tiles are not 8 of 16 rows by 64 bytes";
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0)
        return errno == ENOSPC ? "a thread's signal stack (sigaltstack) has no room for AMX's tiles: it must hold "
                                 "sysconf(_SC_MINSIGSTKSZ) bytes and more"
                               : "the Linux kernel does not permit AMX (it needs 5.16 or later)";
#endif
    return NULL;
}

#endif
#endif
