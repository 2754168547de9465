/* The ternary product with AMX: one instruction multiplies a tile of 16 tokens x 64 columns by a tile of 64 columns x
 * 16 rows: 16,384 int8 products, groups of 4 added into 16 x 16 lanes of int32.
 *
 * Plain version: ternary_scalar.h. Tested on a Sapphire Rapids and on Bochs 3.0's (tests/kernels/amx_machine.py);
 * elsewhere the suite runs this text over tiles in plain C (amx_emulated.h) that check what Intel's manual requires.
 *
 * Operands of the instruction (C += A B, A signed, B unsigned: tdpbsud):
 *   A  16 tokens, 64 activations each: from tiles of tokens (panel.h), or in place from rows of x, x_stride apart.
 *   B  16 lines of 64 bytes; line g holds 4 columns (4g .. 4g+3) of 16 rows, 4 bytes per row: exactly what unpacking
 *      one 2-bit field of a panel's vector gives, so nothing is shuffled for the tiles.
 *   C  16 tokens x 16 rows: starts at -x_sum, stays in tiles over all columns, is stored in place to acc.
 * Eight tile registers: 2 x 2 sums (32 tokens x 32 rows), 2 of tokens, 2 of rows. A step of 64 columns is 4 loads and 4
 *   products. A product occupies the unit for 16 cycles and its latency is 52, so four must be in flight: 16 tokens or
 *   fewer go against all 64 rows (`amx_few`), with 5 loads and 4 products.
 * Weights are unpacked while others are multiplied: after each product a quarter of the step after the next one, into a
 *   ring of four steps in L1. For the second 32 rows and the next 32 tokens they are unpacked again, which costs less
 *   than writing them to L2 and reading them back. Each step prefetches its share of the next panel, a quarter of it after
 *   each product.
 * AVX-512 computes the last columns, fewer than 64, and up to four tokens, for which it reads panels without unpacking.
 * Stores: after some 2,300 cycles without a tile store the next one takes 700 to 900 cycles more, and the unpacked
 *   weights wait behind it (128 products and a store: no loss; 144: 770 cycles; one store between: none). A pass over
 *   2560 columns is longer. So every AMX_STORE_STEPS steps a tile goes to the ring's oldest step, whose lines are in L1.
 *   In the last steps the result's cache lines are fetched: tokens have evicted them from L1 since the last pass.
 *
 * Measured, one thread of a Sapphire Rapids (2,950 G multiply-adds/s of tdpbsud alone), G multiply-adds/s, medians of three
 *   rounds in turn; in brackets with tokens in rows, loads between products and prefetches at the beginning of a step:
 *                              2560 columns                               6912 columns
 *   tokens            16           32           64           128           16           32           64           128
 *   in L2       1458 (1316)  1809 (1601)  1850 (1621)  1918 (1704)   1482 (1412)  1884 (1753)  1930 (1748)  1810 (1666)
 *   not in L2    607  (598)  1184  (852)  1518 (1310)  1802 (1536)    632  (632)  1178  (866)  1506 (1328)  1718 (1563)
 *   The tile stores and the fetches of results' lines, before that: in L2 1.0 to 1.19 times as fast, not in L2 1.0 to 1.15.
 * Limits, in cycles per product (16 at best), 64 tokens of 2560 columns: 18.6 with four loads from L1 per four products,
 *   unpacking included; 28 with tokens and weights in L2, 22 if the tokens are in L1; 36 with weights not in L2, 28 if the
 *   tokens are in L1. So tokens read from L2 and prefetches hinder each other, perhaps for the core's 16 line buffers.
 *   12 layers of 2B-4T read prompts of 64 and 512 tokens 10 to 12% faster than before these stores; of 30 layers, whose
 *   weights come from memory, one quiet pair of runs gained 1%.
 * Tried:
 *   - unpacking one step ahead, not two: 30% slower (a load waits for its lines in the store buffer); three: 0 to 5%
 *   - a ring of eight steps: 5% slower; with 16 tokens, whose steps are twice as large, 50%
 *   - the tokens' next cache lines prefetched into L1, two to eight steps ahead: 5 to 20% slower
 *   - one prefetch for 2 or 4 cache lines, the hardware's for the others: 5 to 20% slower; far ones besides: 0 to 15%; each line
 *     twice, or an eighth to a third of a panel later: the same
 *   - without unpacking, which gives wrong sums: 0.83 of the peak; with its stores alone: as slow as with all of it; with half of
 *     each store: 0.75. So the 32 lines that a step stores bind it, beside 32 of tokens that come from L2
 *   - hence weights unpacked once for all tokens: into tiles in L2, 0.77 of the speed with 288 tokens and less with fewer; into
 *     tiles of 4 to 20 steps in L1, where sums come and go, 0.5 to 0.8. Unpacking by vgf2p8affineqb or to half lines: the same
 *   - a tile stored every 16 steps: the same, 10% slower for 16 tokens; to memory of its own: 3 to 8% slower
 *   - weights prefetched into L1, or 2 to 16 KB ahead, not a panel: 0 to 20% slower; not prefetched: 20 to 25%
 * On a Granite Rapids (3,400 G multiply-adds/s, weights in L3), G multiply-adds/s: 64 tokens 1,830, 256: 2,090. What a step
 *   costs there, tokens in L1, as a fraction of the peak: 4 loads and 4 products 0.76; unpacking as well 0.66; sums stored
 *   to L1 every 1024 columns as well 0.53; loaded from and stored to L2 0.45. Hence, tried there:
 *   - 32 tokens of 1024 columns kept in L1 while 4 to 32 panels pass, in place or copied to tiles: 1,530 to 1,640, for sums
 *     that come and go cost more than tokens out of L2; of 512 columns 1,280 to 1,520
 *   - a step's four loads before its products: 1 to 4% faster here, nothing in a prompt; the ring's slots 3 KB apart, so
 *     that no store meets a load 4 KB away: the same */
#ifndef BITNET_REF_TERNARY_AMX_H
#define BITNET_REF_TERNARY_AMX_H

#include "ternary_avx512.h"

#if defined(__x86_64__) && defined(__linux__)
#define BITNET_REF_HAS_AMX 1

enum { AMX_MIN_TOKENS = 5, AMX_ROWS = 16, AMX_PAIR = 2 * AMX_ROWS, AMX_TILE_BYTES = 1024, AMX_STEP_BLOCKS = 4, AMX_AHEAD = 2, AMX_RING = 4, AMX_STORE_STEPS = 8 };

/* What ldtilecfg reads: palette 1 has 8 tiles of at most 16 rows of at most 64 bytes. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16]; /* bytes in a row, for each tile */
    uint8_t rows[16];
} amx_config;

#if defined(BITNET_REF_AMX_EMULATED)
#include "amx_emulated.h" /* in tests/kernels */
#else
/* Not the compiler's intrinsics: GCC's _tile_loadconfig names 8 of the 64 bytes as its input, so stores to the others
 * may be dropped. Here the operand is the whole structure, and every access to tiles is volatile and uses memory, so
 * the compiler keeps their order. */
static inline void amx_configure(const amx_config *config) { __asm__ volatile("ldtilecfg %0" ::"m"(*config)); }
static inline void amx_release(void) { __asm__ volatile("tilerelease" ::: "memory"); }
#define AMX_LOAD(tile, base, stride)                                                                                   \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(base), "r"((size_t)(stride)) : "memory")
#define AMX_LOAD_ONCE(tile, base, stride) /* a hint: these lines need not stay in L1 */                                \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(base), "r"((size_t)(stride)) : "memory")
#define AMX_STORE(tile, base, stride)                                                                                  \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"((size_t)(stride)) : "memory")
#define AMX_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
/* sum += a b: a signed, b unsigned in AMX_DOT */
#define AMX_DOT(sum, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#define AMX_DOT_SIGNED(sum, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
/* of pairs of bfloat16, in float32 */
#define AMX_DOT_BF16(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#endif

/* Configures tiles for 1 to 32 tokens. 17 or more: tiles 0-3 are sums, [tokens 0-15 or 16-31][rows 0-15 or 16-31]; 4, 5
 * tokens; 6, 7 rows. 16 or fewer: tiles 0-3 are sums of all 64 rows; 4 the tokens; 5, 6, 7 rows, in turn. */
static inline void amx_set_tiles(size_t tokens) {
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

/* The weights of the passes through a panel. Each step of 64 columns is unpacked AMX_AHEAD steps before it is
 * multiplied, across the end of a pass into the next one. */
typedef struct {
    const uint8_t *panel;
    size_t n_steps, vectors; /* steps per pass; vectors of 16 rows per step, 2 or 4 */
    size_t step, vector;     /* the next step to be unpacked, and its first vector */
    uint8_t *ring;           /* AMX_RING unpacked steps: `vectors` tiles each */
    size_t slot;             /* of the next step to be multiplied */
    const char *next;        /* the packed columns after this panel, of which each step prefetches `fetched` bytes */
    size_t fetched;
} amx_weights;

/* The ring's place for the step that is multiplied `ahead` steps from now */
AVX512_INLINE uint8_t *amx_slot(const amx_weights *w, size_t ahead) {
    return w->ring + (w->slot + ahead) % AMX_RING * w->vectors * AMX_TILE_BYTES;
}

/* Stores a tile of weights into the ring's oldest step: see "Stores" above. */
AVX512_INLINE void amx_keep_awake(const amx_weights *w, size_t step) {
    if (step % AMX_STORE_STEPS == AMX_STORE_STEPS - 1) AMX_STORE(6, amx_slot(w, AMX_RING - 1), VECTOR_BYTES);
}

/* Fetches the results' lines of two tokens, and of two that are 16 later. */
AVX512_INLINE void amx_fetch_sums(int32_t *acc, size_t acc_stride) {
    for (size_t t = 0; t < 4; t++) {
        int32_t *to = acc + (t / 2 * AMX_ROWS + t % 2) * acc_stride;
        _mm_prefetch((const char *)to, _MM_HINT_T0);
        _mm_prefetch((const char *)(to + 16), _MM_HINT_T0);
    }
}

/* The packed weights of the next step; moves on to the one after it */
AVX512_INLINE const uint8_t *amx_take_step(amx_weights *w) {
    const uint8_t *from = w->panel + w->step * AMX_STEP_BLOCKS * BLOCK_BYTES + w->vector * VECTOR_BYTES;
    if (++w->step == w->n_steps) w->step = 0, w->vector = (w->vector + w->vectors) % 4;
    return from;
}

/* A quarter of a step's prefetches: more at once would take the line buffers that the tiles' loads need. */
AVX512_INLINE void amx_fetch(amx_weights *w, size_t quarter) {
    for (size_t i = quarter * VECTOR_BYTES; i < w->fetched; i += 4 * VECTOR_BYTES) _mm_prefetch(w->next + i, _MM_HINT_T1);
    if (quarter == 3) w->next += w->fetched;
}

/* a quarter of a step (16 columns of all its rows) -> 4 lines of each tile. Prefetches a quarter of the step's share. */
AVX512_INLINE void amx_unpack(amx_weights *w, const uint8_t *from, uint8_t *to, size_t block, const size_t vectors) {
    amx_fetch(w, block);
    for (size_t v = 0; v < vectors; v++)
        avx512_unpack_vector(from + block * BLOCK_BYTES + v * VECTOR_BYTES,
                             to + v * AMX_TILE_BYTES + block * 4 * VECTOR_BYTES, VECTOR_BYTES);
}

/* Unpacks the first AMX_AHEAD steps of the panel, of `vectors` vectors each. */
AVX512_INLINE void amx_begin(amx_weights *w, const size_t vectors) {
    w->vectors = vectors, w->step = w->vector = 0;
    for (size_t ahead = 0; ahead < AMX_AHEAD; ahead++) {
        const uint8_t *from = amx_take_step(w);
        for (size_t block = 0; block < AMX_STEP_BLOCKS; block++) amx_unpack(w, from, amx_slot(w, ahead), block, vectors);
    }
}

/* Tiles 0 to 3 = (16, 16) sums of two groups of tokens */
static inline void amx_load_sums(const int32_t *tokens_01, const int32_t *tokens_23) {
    AMX_LOAD(0, tokens_01, VECTOR_BYTES);
    AMX_LOAD(1, tokens_01, VECTOR_BYTES);
    AMX_LOAD(2, tokens_23, VECTOR_BYTES);
    AMX_LOAD(3, tokens_23, VECTOR_BYTES);
}

static inline void amx_store_sums(int32_t *acc0, int32_t *acc1, int32_t *acc2, int32_t *acc3, size_t acc_stride) {
    AMX_STORE(0, acc0, acc_stride * sizeof(int32_t));
    AMX_STORE(1, acc1, acc_stride * sizeof(int32_t));
    AMX_STORE(2, acc2, acc_stride * sizeof(int32_t));
    AMX_STORE(3, acc3, acc_stride * sizeof(int32_t));
}

/* Tokens in rows, or in tiles (panel.h): where tile `step` of the first and of the second 16 tokens begins. */
typedef struct {
    const int8_t *x;
    size_t step_bytes, row_bytes, second;
} amx_tokens;

/* A pass of 17 to 32 tokens against 32 rows: acc = sums + codes * x. sums (32, 16): -x_sum. The tiles are set. */
AVX512_TARGET static void amx_pair(amx_weights *weights, amx_tokens tokens, const int32_t *sums, int32_t *acc, size_t acc_stride) {
    int32_t *acc1 = acc + AMX_ROWS * acc_stride;
    amx_weights w = *weights;
    amx_load_sums(sums, sums + AMX_ROWS * 16);
    for (size_t step = 0; step < w.n_steps; step++, tokens.x += tokens.step_bytes) {
        const uint8_t *b = amx_slot(&w, 0), *from = amx_take_step(&w);
        uint8_t *to = amx_slot(&w, AMX_AHEAD);
        AMX_LOAD_ONCE(4, tokens.x, tokens.row_bytes);
        AMX_LOAD(6, b, VECTOR_BYTES);
        AMX_LOAD(7, b + AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_LOAD_ONCE(5, tokens.x + tokens.second, tokens.row_bytes);
        AMX_DOT(0, 4, 6);
        amx_unpack(&w, from, to, 0, 2);
        AMX_DOT(1, 4, 7);
        amx_unpack(&w, from, to, 1, 2);
        AMX_DOT(2, 5, 6);
        amx_unpack(&w, from, to, 2, 2);
        AMX_DOT(3, 5, 7);
        amx_unpack(&w, from, to, 3, 2);
        amx_keep_awake(&w, step);
        if (step + 8 >= w.n_steps) amx_fetch_sums(acc + 2 * (w.n_steps - 1 - step) * acc_stride, acc_stride);
        w.slot++;
    }
    amx_store_sums(acc, acc + 16, acc1, acc1 + 16, acc_stride);
    *weights = w;
}

/* The same for 1 to 16 tokens against all 64 rows. */
AVX512_TARGET static void amx_few(amx_weights *weights, amx_tokens tokens, const int32_t *sums, int32_t *acc, size_t acc_stride) {
    amx_weights w = *weights;
    amx_load_sums(sums, sums);
    for (size_t step = 0; step < w.n_steps; step++, tokens.x += tokens.step_bytes) {
        const uint8_t *b = amx_slot(&w, 0), *from = amx_take_step(&w);
        uint8_t *to = amx_slot(&w, AMX_AHEAD);
        AMX_LOAD_ONCE(4, tokens.x, tokens.row_bytes);
        AMX_LOAD(5, b, VECTOR_BYTES);
        AMX_LOAD(6, b + AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_LOAD(7, b + 2 * AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(0, 4, 5);
        amx_unpack(&w, from, to, 0, 4);
        AMX_LOAD(5, b + 3 * AMX_TILE_BYTES, VECTOR_BYTES);
        AMX_DOT(1, 4, 6);
        amx_unpack(&w, from, to, 1, 4);
        AMX_DOT(2, 4, 7);
        amx_unpack(&w, from, to, 2, 4);
        AMX_DOT(3, 4, 5);
        amx_unpack(&w, from, to, 3, 4);
        amx_keep_awake(&w, step);
        w.slot++;
    }
    amx_store_sums(acc, acc + 16, acc + 32, acc + 48, acc_stride);
    *weights = w;
}

/* Any M. `acc` has all 64 rows. tiled: x is in tiles (panel.h), else in rows. */
AVX512_INLINE void amx_many(TERNARY_ARGS, uint8_t *scratch, const int tiled) {
    const size_t n_steps = n_blocks / AMX_STEP_BLOCKS, left = n_blocks % AMX_STEP_BLOCKS, n_bytes = n_blocks * BLOCK_BYTES;
    const size_t rest = M % AMX_PAIR, passes = M / AMX_PAIR * 2 + (rest + AMX_ROWS - 1) / AMX_ROWS;
    const uint8_t *after = panel + n_bytes;
    int32_t *sums = (int32_t *)(scratch + AMX_RING * 4 * AMX_TILE_BYTES); /* (32, 16) */
    amx_tokens of = {x, VECTOR_BYTES, x_stride, AMX_ROWS * x_stride};
    if (tiled) of = (amx_tokens){x, 2 * AMX_TILE_BYTES, VECTOR_BYTES, AMX_TILE_BYTES};
    if (n_steps) {
        amx_weights w = {.panel = panel, .n_steps = n_steps, .ring = scratch, .next = (const char *)after};
        w.fetched = (n_bytes + passes * n_steps - 1) / (passes * n_steps);
        for (size_t m = 0; m < M; m += AMX_PAIR) {
            const size_t tokens = M - m < AMX_PAIR ? M - m : AMX_PAIR;
            int32_t *out = acc + m * acc_stride;
            of.x = x + m * x_stride;
            for (size_t t = 0; t < tokens; t++) _mm512_store_si512(sums + 16 * t, _mm512_set1_epi32(-x_sum[m + t]));
            if (m == 0 || tokens < AMX_PAIR) amx_set_tiles(tokens);
            if (tokens <= AMX_ROWS) {
                amx_begin(&w, 4);
                amx_few(&w, of, sums, out, acc_stride);
            } else {
                if (m == 0) amx_begin(&w, 2);
                amx_pair(&w, of, sums, out, acc_stride);
                amx_pair(&w, of, sums, out + 2 * AMX_ROWS, acc_stride);
            }
        }
        amx_release();
    }
    const size_t together = tiled ? AMX_PAIR : M;
    for (size_t m = 0; left && m < M; m += together) {
        const size_t tokens = M - m < together ? M - m : together;
        const int8_t *last = x + m * x_stride + n_steps * of.step_bytes;
        int32_t *out = acc + m * acc_stride;
        if (!n_steps) {
            avx512_many(panel, n_blocks, last, of.row_bytes, tokens, x_sum + m, out, acc_stride, scratch);
            continue;
        }
        avx512_unpack(panel + n_steps * AMX_STEP_BLOCKS * BLOCK_BYTES, left, scratch);
        avx512_tiles(scratch, 4 * left, last, of.row_bytes, tokens, after, out, acc_stride);
    }
}

AVX512_TARGET static void amx_many_rows(TERNARY_ARGS, uint8_t *scratch) { amx_many(TERNARY_PASS, scratch, 0); }
AVX512_TARGET static void amx_many_tiles(TERNARY_ARGS, uint8_t *scratch) { amx_many(TERNARY_PASS, scratch, 1); }

AVX512_TARGET static void ternary_panel_amx(TERNARY_ARGS, size_t rows, void *scratch) {
    if (M < AMX_MIN_TOKENS)
        ternary_panel_avx512(TERNARY_PASS, rows, scratch);
    else
        ternary_64_rows(amx_many_rows, TERNARY_PASS, rows, scratch);
}

/* x: in tiles */
AVX512_TARGET static void ternary_tiled_amx(TERNARY_ARGS, size_t rows, void *scratch) {
    ternary_64_rows(amx_many_tiles, TERNARY_PASS, rows, scratch);
}

#if !defined(BITNET_REF_AMX_EMULATED)
#include <cpuid.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* NULL when this process may use the tiles. Linux gives their 8 KB of state only to a process that asks: once, for all
 * present and future threads and forked children. It refuses when a thread's signal stack could not hold them. */
static const char *amx_lacks(void) {
#if !defined(BITNET_REF_AMX_EMULATED)
    enum { OSXSAVE = 1 << 27, AMX_ALL = 1 << 22 /* bfloat16 */ | 1 << 24 /* tiles */ | 1 << 25 /* int8 */, XCR0_TILES = 3 << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* arch_prctl's ARCH_REQ_XCOMP_PERM, the state's number */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX_ALL) != AMX_ALL)
        return "the processor has no AMX with int8 and bfloat16";
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return "the operating system does not save AMX tiles";
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    if ((a & XCR0_TILES) != XCR0_TILES) return "the operating system does not save AMX tiles";
    /* tile palette 1, as this file uses it: 8 tiles (b >> 16) of 1024 bytes (a >> 16), 64 bytes (b) by 16 rows (c) */
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
