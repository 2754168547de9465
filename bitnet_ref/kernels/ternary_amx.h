/* The ternary product with AMX: one instruction multiplies a tile of 16 tokens x 64 columns by a tile of 64 columns x 16
 * rows: 16,384 int8 products, added by fours into 16 x 16 lanes of int32.
 *
 * Plain version: ternary_scalar.h. RUN ON EMULATORS ONLY, NOT TIMED: no processor with AMX was at hand. All of this file,
 * the instructions and the question to the kernel too, ran equal to the plain version on Bochs 3.0's Sapphire Rapids under
 * Linux 6.12 (tests/kernels/amx_machine.py; with bochs.patch, for that Bochs has AMX faults, which are mended by the manual
 * as this was written by it). The suite runs this text over tiles in plain C that check all that the manual asks of a
 * configuration (amx_emulated.h), and looks for the instructions in the built extension. No figure here is a measurement:
 * those in cycles are of Intel's optimisation manual.
 *
 * The operands, in the terms of the instruction (C += A B, A signed, B unsigned: tdpbsud):
 *   A  16 tokens, 64 activations each: read from x as it lies, rows x_stride apart.
 *   B  16 lines of 64 bytes; line g holds 4 columns (4g .. 4g+3) of 16 rows, 4 bytes for a row: just what unpacking one
 *      2-bit field of a panel's vector gives, and how avx512_unpack stores it. So nothing is shuffled for the tiles.
 *   C  16 tokens x 16 rows: written to acc as it lies, tokens acc_stride apart.
 * Eight tile registers: 2 x 2 sums (32 tokens x 32 rows), 2 of tokens, 2 of rows. A step of 64 columns is 4 loads and 4
 *   products; a product keeps the unit busy for 16 cycles, a load from L1 for 8, so loads are hidden. Its sum comes after
 *   52, so there must be four in turn: 16 tokens or fewer go against all 64 rows (`amx_few`), 5 loads and 4 products.
 * Columns come in chunks of AMX_K = 1024: the panel's part is unpacked to bytes (64 KB, in L2) once for all tokens, the
 *   sums are loaded and stored once a chunk, 16 products later. Unpacking is about a cycle for 64 weights: as much as the
 *   products of 16 tokens, a fifth of the whole at 64 tokens.
 * While a chunk is multiplied the next one is fetched, with each step its part: 16 KB come from memory in as long as the
 *   products of 64 tokens take.
 * A chunk's last step may have 16, 32 or 48 columns: tiles of their own width (`configure`), for a tile load must not
 *   read past x. The same for the last tokens. The configuration costs some hundred cycles, so it is set only when the
 *   shape changes.
 * Up to avx512_few's four tokens the AVX-512 kernels run: they read panels without unpacking. So do the float steps.
 */
#ifndef BITNET_REF_TERNARY_AMX_H
#define BITNET_REF_TERNARY_AMX_H

#include "ternary_avx512.h"

#if defined(__x86_64__) && defined(__linux__)
#define BITNET_REF_HAS_AMX 1

enum { AMX_K = 1024, AMX_ROWS = 16, AMX_COLUMNS = 64, AMX_PAIR = 2 * AMX_ROWS };

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
/* sum += a (signed) b (unsigned) */
#define AMX_DOT(sum, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)
#endif

/* Tiles 0-3: sums, [tokens 0-15 or 16-31][rows 0-15 or 16-31]. 4, 5: those tokens. 6, 7: those rows.
 * With 16 tokens or fewer, 0-3: sums, of all 64 rows. 4: the tokens. 5, 6, 7: rows, in turn.
 * `tokens` of 1 to 32, `columns` a multiple of 4 to 64. */
static inline void amx_shape(size_t tokens, size_t columns) {
    amx_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    const int few = tokens <= AMX_ROWS;
    const size_t first = few ? tokens : AMX_ROWS, second = few ? tokens : tokens - AMX_ROWS;
    for (int tile = 0; tile < 8; tile++) {
        const int is_tokens = tile == 4 || (tile == 5 && !few);
        const size_t rows = tile > 4 && !is_tokens ? columns / 4 : tile == 4 || tile < 2 ? first : second;
        config.rows[tile] = (uint8_t)rows;
        config.colsb[tile] = (uint16_t)(is_tokens ? columns : 64);
    }
    amx_configure(&config);
}

/* What a chunk's steps fetch meanwhile: with each of them, `ahead` bytes. */
typedef struct {
    const char *next;
    size_t ahead;
} amx_fetch;

static inline void amx_fetch_step(amx_fetch *fetch) {
    for (size_t i = 0; i < fetch->ahead; i += 64) _mm_prefetch(fetch->next + i, _MM_HINT_T1);
    fetch->next += fetch->ahead;
}

/* n_steps steps of `columns` columns: 17 to 32 tokens against 32 rows of unpacked columns. The configuration is theirs. */
static inline void amx_tile(const uint8_t *bytes, size_t n_steps, size_t columns, const int8_t *x, size_t x_stride,
                            int32_t *acc, size_t acc_stride, amx_fetch *fetch) {
    const size_t acc_bytes = acc_stride * sizeof *acc;
    const int8_t *x1 = x + AMX_ROWS * x_stride;
    int32_t *acc1 = acc + AMX_ROWS * acc_stride;
    AMX_LOAD(0, acc, acc_bytes);
    AMX_LOAD(1, acc + 16, acc_bytes);
    AMX_LOAD(2, acc1, acc_bytes);
    AMX_LOAD(3, acc1 + 16, acc_bytes);
    for (size_t step = 0; step < n_steps; step++) {
        const uint8_t *b = bytes + step * (columns / 4) * BLOCK_BYTES;
        amx_fetch_step(fetch);
        AMX_LOAD(4, x + step * columns, x_stride);
        AMX_LOAD(6, b, BLOCK_BYTES);
        AMX_DOT(0, 4, 6);
        AMX_LOAD(7, b + VECTOR_BYTES, BLOCK_BYTES);
        AMX_DOT(1, 4, 7);
        AMX_LOAD(5, x1 + step * columns, x_stride);
        AMX_DOT(2, 5, 6);
        AMX_DOT(3, 5, 7);
    }
    AMX_STORE(0, acc, acc_bytes);
    AMX_STORE(1, acc + 16, acc_bytes);
    AMX_STORE(2, acc1, acc_bytes);
    AMX_STORE(3, acc1 + 16, acc_bytes);
}

/* n_steps steps of `columns` columns: 1 to 16 tokens against 64 rows. The configuration is theirs. */
static inline void amx_few(const uint8_t *bytes, size_t n_steps, size_t columns, const int8_t *x, size_t x_stride,
                           int32_t *acc, size_t acc_stride, amx_fetch *fetch) {
    const size_t acc_bytes = acc_stride * sizeof *acc;
    AMX_LOAD(0, acc, acc_bytes);
    AMX_LOAD(1, acc + 16, acc_bytes);
    AMX_LOAD(2, acc + 32, acc_bytes);
    AMX_LOAD(3, acc + 48, acc_bytes);
    for (size_t step = 0; step < n_steps; step++) {
        const uint8_t *b = bytes + step * (columns / 4) * BLOCK_BYTES;
        amx_fetch_step(fetch);
        AMX_LOAD(4, x + step * columns, x_stride);
        AMX_LOAD(5, b, BLOCK_BYTES);
        AMX_DOT(0, 4, 5);
        AMX_LOAD(6, b + VECTOR_BYTES, BLOCK_BYTES);
        AMX_DOT(1, 4, 6);
        AMX_LOAD(7, b + 2 * VECTOR_BYTES, BLOCK_BYTES);
        AMX_DOT(2, 4, 7);
        AMX_LOAD(5, b + 3 * VECTOR_BYTES, BLOCK_BYTES);
        AMX_DOT(3, 4, 5);
    }
    AMX_STORE(0, acc, acc_bytes);
    AMX_STORE(1, acc + 16, acc_bytes);
    AMX_STORE(2, acc + 32, acc_bytes);
    AMX_STORE(3, acc + 48, acc_bytes);
}

/* All M tokens against the chunk's steps of one width: full pairs first, then the tokens left over */
static inline void amx_steps(const uint8_t *bytes, size_t n_steps, size_t columns, const int8_t *x, size_t x_stride,
                             size_t M, int32_t *acc, size_t acc_stride, amx_fetch *fetch) {
    for (size_t m = 0; m < M; m += AMX_PAIR) {
        const size_t tokens = M - m < AMX_PAIR ? M - m : AMX_PAIR;
        if (m == 0 || tokens != AMX_PAIR) amx_shape(tokens, columns);
        if (tokens <= AMX_ROWS)
            amx_few(bytes, n_steps, columns, x + m * x_stride, x_stride, acc + m * acc_stride, acc_stride, fetch);
        else
            for (size_t half = 0; half < 2; half++)
                amx_tile(bytes + half * 2 * VECTOR_BYTES, n_steps, columns, x + m * x_stride, x_stride,
                         acc + m * acc_stride + half * 32, acc_stride, fetch);
    }
}

/* Any M. `acc` has all 64 rows. */
AVX512_TARGET static void amx_many(const uint8_t *panel, size_t n_blocks, const int8_t *x, size_t x_stride, size_t M,
                                   const int32_t *x_sum, int32_t *acc, size_t acc_stride, uint8_t *scratch) {
    const size_t passes = M / AMX_PAIR * 2 + (M % AMX_PAIR + AMX_ROWS - 1) / AMX_ROWS; /* through the steps of a chunk */
    avx512_begin(x_sum, M, acc, acc_stride);
    for (size_t start = 0; start < n_blocks; start += AMX_K / BLOCK_K) {
        const size_t blocks = n_blocks - start < AMX_K / BLOCK_K ? n_blocks - start : AMX_K / BLOCK_K;
        const size_t n_steps = blocks / 4, left = blocks % 4 * BLOCK_K, steps = passes * (n_steps + (left > 0));
        const int8_t *xs = x + start * BLOCK_K;
        amx_fetch fetch = {(const char *)panel + (start + blocks) * BLOCK_BYTES, (blocks * BLOCK_BYTES + steps - 1) / steps};
        avx512_unpack(panel + start * BLOCK_BYTES, blocks, scratch);
        if (n_steps) amx_steps(scratch, n_steps, AMX_COLUMNS, xs, x_stride, M, acc, acc_stride, &fetch);
        if (left)
            amx_steps(scratch + n_steps * AMX_ROWS * BLOCK_BYTES, 1, left, xs + n_steps * AMX_COLUMNS, x_stride, M, acc,
                      acc_stride, &fetch);
    }
    amx_release();
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
