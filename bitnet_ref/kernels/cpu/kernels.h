/* The kernel sets, one per instruction set, each compiled for its own target; one is chosen at run time. */
#ifndef BITNET_REF_KERNELS_H
#define BITNET_REF_KERNELS_H

#include <unistd.h>

#include "bfloat16_avx512.h"
#include "dense_amx.h"
#include "dense_avx512.h"
#include "greedy.h"
#include "group.h"
#include "group_avx512.h"
#include "kv_cache.h"
#include "peaks.h"
#include "screen_avx512.h"
#include "strips_avx512.h"
#include "table_avx2.h"
#include "ternary_amx.h"
#include "ternary_avx2.h"
#include "ternary_avx512.h"
#include "ternary_avxvnni.h"
#include "ternary_neon.h"
#include "ternary_scalar.h"

/* training/ops.py's AdamRates, with rest1 = 1 - b1 and rest2 = 1 - b2 */
typedef struct {
    float b1, rest1, b2, rest2, v_scale, eps, keep, step_size;
} adamw_rates;

enum { NO_GATE, RELU2, SILU }; /* activations by their numbers in backends/cpu/kernels.py */

/* The sums of a panel of one matrix, or of gate and up, and what becomes of them: act(gate) * up, or the one, (+ residual),
 * where a factor is acc * (w_scale / x_scale) (+ bias) (+ term). Arrays begin at the panel's first row. */
typedef struct {
    const int32_t *acc[2]; /* (tokens, PANEL_ROWS) */
    float w_scale[2];
    const float *bias[2]; /* (rows) or NULL */
    const float *term[2]; /* of an adapter: (tokens, rows), as residual and y `stride` apart; or NULL */
    const float *residual;
    const float *x_scale; /* (tokens) */
    float *y;
    size_t tokens, rows, stride;
    int gate;
} panel_results;

#define STEP(name) name##_plain
#define STEP_BYTES 16
#define STEP_MULADD(a, b, c) ((a) * (b) + (c))
#define STEP_TARGET
#include "float_steps.h"

#if defined(__x86_64__)
#define STEP(name) name##_avx2
#define STEP_BYTES 32
#define STEP_MULADD(a, b, c) ((STEP(f64v))_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#define STEP_TARGET __attribute__((target("avx2,fma,f16c")))
#include "float_steps.h"
#define STEP(name) name##_avx512
#define STEP_BYTES 64
#define STEP_MULADD(a, b, c) ((STEP(f64v))_mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c)))
#define STEP_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#include "float_steps.h"
#include "screen_amx.h"
#endif
#include "attention_amx.h"
#include "blocks_amx.h"

/* A layout of ternary weights in panels of 64 rows, and the form of x that its kernels read. All are exact. */
typedef struct {
    const char *name;
    size_t block_k; /* columns in a block of 256 bytes */
    size_t x_bytes; /* that a kernel reads per token and block: block_k where it reads x itself */
    void (*pack)(const uint8_t *packed, size_t rows, size_t row_bytes, uint8_t *panel);
    void (*unpack)(const uint8_t *panel, size_t rows, size_t row_bytes, uint8_t *packed);
    void (*expand)(const int8_t *x, size_t n_blocks, uint8_t *out); /* what kernels read instead of x, or NULL */
} ternary_method;

enum { MULTIPLY_ADD, TABLE_LOOK_UP, DENSE, N_METHODS };
static const ternary_method METHODS[N_METHODS] = {
    {"2-bit", BLOCK_K, BLOCK_K, pack_panel, unpack_panel, NULL},
    {"table", BLOCK_K, TABLE_BYTES, pack_table_panel, unpack_table_panel, table_expand},
    {"1.6-bit", DENSE_BLOCK_K, DENSE_BLOCK_K, pack_dense_panel, unpack_dense_panel, NULL},
};

/* A set's kernel for a method. run NULL: there is none. The scalar kernel must run for more than max_k columns (0: no
 * limit). run_tiled: the same for x in tiles (panel.h), faster for many tokens; or NULL. */
typedef struct {
    ternary_panel_fn run;
    size_t max_k;
    ternary_panel_fn run_tiled;
} ternary_kernel;

typedef struct {
    const char *name;
    ternary_kernel ternary[N_METHODS];
    peak_fn peak; /* the peak rate of its product instruction, or NULL */
    int (*rms_norm)(const float *, const float *, size_t, double, float *);
    int (*quantize)(const float *, size_t, int8_t *, float *, int32_t *);
    void (*dequantize)(const int32_t *, size_t, float, float, const float *, float *);
    void (*gated)(const float *, const float *, size_t, int, float *);
    void (*finish)(const panel_results *);
    void (*rope)(const float *, size_t, size_t, const float *, const float *, float *);
    attend_fn attend;
    ptrdiff_t (*draw)(const float *, size_t, const draw_rule *, double, double *, float *);
    ptrdiff_t (*first_largest)(const float *, size_t);
    void (*dense_pack)(const float *, size_t, size_t, float *);
    void (*dense_rows)(int, const void *, size_t, size_t, const float *, size_t, float *, size_t, float *);
    void (*screen_pack)(int, const void *, size_t, size_t, int8_t *, float *);
    int (*screen_token)(const float *, size_t, size_t, int16_t *, double *);
    /* ternary by groups: group.h */
    int group_layout;
    double (*group_token)(const group_shape *, const float *, const double *, size_t, uint8_t *, int32_t *);
    void (*group_panel)(const group_shape *, const uint8_t *, const void *, int, size_t, const group_chunk *, size_t,
                        double *, ternary_panel_fn, void *, const uint8_t *next);
    int (*ruled_token)(const float *, size_t, int, uint8_t *);
    void (*ruled_panel)(int, const uint8_t *, size_t, const uint8_t *, size_t, size_t, size_t, float *, size_t);
    void (*lora_down)(int, const void *, size_t, size_t, const float *, float *);
    void (*lora_up)(int, const void *, size_t, size_t, size_t, size_t, const float *, float *);
    void (*screen_rows)(const int8_t *, size_t, size_t, size_t, const float *, const int16_t *, size_t, const double *,
                        float *, float *, size_t);
    /* makes what `screen_rows` reads instead of X for M > SCREEN_TILE_TOKENS: (M rounded up to 16, wide); or NULL */
    void (*screen_arrange)(const int16_t *X, size_t M, size_t wide, int16_t *arranged);
    strip_rows_fn strip_rows; /* NULL, as `strip_columns`: this set reads everything */
    strip_columns_fn strip_columns;
    list_columns_fn list_columns;
    list_gates_fn list_gates;
    strip_rows_fn strip_rows_near; /* of strips in a cache, for one of several tokens; NULL: these are multiplied by panels */
    strip_columns_fn strip_columns_near;
    strip_order_fn strip_order;
    strip_limits limits;
    /* training: training_steps.h */
    void (*norm_backward)(const float *, const float *, const float *, size_t, double, float *, double *);
    void (*softmax_row)(double *, size_t, double, float *);
    void (*softmax_backward)(float *, const float *, size_t, float);
    void (*relu2_backward)(const float *, const float *, const float *, size_t, float *, float *);
    void (*ternarize)(const float *, size_t, float, uint8_t *, float *);
    void (*rescale)(const int8_t *, size_t, float, float *);
    double (*sum_of_squares)(const float *, size_t);
    void (*adamw)(float *, const float *, float *, float *, size_t, const adamw_rates *);
    /* bfloat16 matrices, and most in blocks, with K a multiple of 32: dense_amx.h, blocks_amx.h. NULL: `dense_rows` computes them */
    tile_method tiles[N_TILE_METHODS];
    /* attention of prompts from slices of the keys and values: attention_amx.h. NULL: `attend` computes it too */
    slice_chunk_fn slice_chunk;
    attend_sliced_fn attend_sliced;
} kernel_set;

#define FLOAT_STEPS(suffix)                                                                                            \
    rms_norm_##suffix, quantize_##suffix, dequantize_##suffix, gated_##suffix, finish_##suffix, rope_##suffix,         \
        attend_##suffix, draw_##suffix, first_largest_##suffix, dense_pack_##suffix, dense_rows_##suffix,                                      \
        screen_pack_##suffix, screen_token_##suffix, GROUP_LAYOUT_##suffix, group_token_##suffix, group_panel_##suffix,    \
        ruled_token_##suffix, ruled_panel_##suffix,                                                                        \
        lora_down_##suffix, lora_up_##suffix
#define SCREEN(suffix) screen_rows_##suffix, NULL
#define STRIPS(suffix, lists) strip_rows_##suffix, strip_columns_##suffix, list_columns_##lists, list_gates_##lists
#define NEAR_STRIPS(rows, columns, order, ...) \
    strip_rows_##rows, strip_columns_near_##columns, strip_order_##order, {__VA_ARGS__}
#define NO_NEAR_STRIPS NULL, NULL, NULL, {0, 0, 0, 0}
#define TRAINING(suffix)                                                                                               \
    norm_backward_##suffix, softmax_row_##suffix, softmax_backward_##suffix, relu2_backward_##suffix,                  \
        ternarize_##suffix, rescale_##suffix, sum_of_squares_##suffix, adamw_##suffix

/* setup.py defines BITNET_REF_UNITS: each family of sets is then compiled in a file of its own, side by side. */
#define PLAIN 1
#define AVX2 2
#define AVX512 3
#if !defined(BITNET_REF_UNITS)
#define SETS_OF(family) 1
#define KERNEL_SET static const kernel_set
#else
#define SETS_OF(family) (BITNET_REF_SETS == family) /* which sets_*.c defines */
#define KERNEL_SET __attribute__((visibility("hidden"))) const kernel_set
extern KERNEL_SET set_scalar, set_neon, set_dotprod, set_avx2, set_avxvnni, set_avx512, set_amx;
#endif

#if SETS_OF(PLAIN)
KERNEL_SET set_scalar = {
    "scalar", {{ternary_panel_scalar, 0}, {table_panel_scalar, 0}, {dense_panel_scalar, 0}}, NULL,
    FLOAT_STEPS(plain), SCREEN(plain), STRIPS(plain, plain), NEAR_STRIPS(plain, plain, plain, 15, 55, 45, 40), TRAINING(plain)};
#if defined(__aarch64__)
KERNEL_SET set_neon = {
    "neon", {{ternary_panel_neon, 0}}, NULL,
    FLOAT_STEPS(plain), SCREEN(plain), STRIPS(neon, plain), NO_NEAR_STRIPS, TRAINING(plain)};
KERNEL_SET set_dotprod = {
    "dotprod", {{ternary_panel_dotprod, 0}}, NULL,
    FLOAT_STEPS(plain), SCREEN(plain), STRIPS(neon, plain), NO_NEAR_STRIPS, TRAINING(plain)};
#endif
#endif
#if defined(__x86_64__) && SETS_OF(AVX2)
KERNEL_SET set_avx2 = {
    "avx2", {{ternary_panel_avx2, 0}, {table_panel_avx2, 0}}, peak_avx2,
    FLOAT_STEPS(avx2), SCREEN(avx2), STRIPS(avx2, plain), NEAR_STRIPS(avx2, avx2, plain, 15, 55, 45, 40), TRAINING(avx2)};
#if defined(BITNET_REF_HAS_AVXVNNI)
KERNEL_SET set_avxvnni = {
    "avxvnni", {{ternary_panel_avxvnni, 0}, {table_panel_avx2, 0}}, peak_avxvnni,
    FLOAT_STEPS(avx2), SCREEN(avx2), STRIPS(avx2, plain), NEAR_STRIPS(avx2, avx2, plain, 15, 40, 35, 20), TRAINING(avx2)};
#endif
#endif
#if defined(__x86_64__) && SETS_OF(AVX512)
#define AVX512_TERNARY(panel, tiled) {{panel, AVX512_MAX_K, tiled}, {table_panel_avx2, 0}, {dense_panel_avx512, DENSE_MAX_K}}
KERNEL_SET set_avx512 = {
    "avx512", AVX512_TERNARY(ternary_panel_avx512, NULL), peak_avx512,
    FLOAT_STEPS(avx512), SCREEN(avx512), STRIPS(avx512, avx512), NEAR_STRIPS(near_avx512, avx512, avx512, 15, 55, 65, 40),
    TRAINING(avx512)};
#if defined(BITNET_REF_HAS_AMX)
KERNEL_SET set_amx = {
    "amx", AVX512_TERNARY(ternary_panel_amx, ternary_tiled_amx), peak_amx,
    FLOAT_STEPS(avx512), screen_rows_amx, screen_arrange_amx, STRIPS(avx512, avx512),
    NEAR_STRIPS(near_avx512, avx512, avx512, 6, 30, 0, 0), TRAINING(avx512),
    {{dense_bytes_amx, dense_split_amx, dense_tiles_amx}, {block_bytes_amx, block_split_amx, block_tiles_amx}},
    slice_chunk_amx, attend_sliced_amx};
#endif
#endif

/* best last */
static const kernel_set *const KERNEL_SETS[] = {
    &set_scalar,
#if defined(__x86_64__)
    &set_avx2,
#if defined(BITNET_REF_HAS_AVXVNNI)
    &set_avxvnni,
#endif
    &set_avx512,
#if defined(BITNET_REF_HAS_AMX)
    &set_amx,
#endif
#elif defined(__aarch64__)
    &set_neon, &set_dotprod,
#endif
};
enum { N_KERNEL_SETS = sizeof KERNEL_SETS / sizeof *KERNEL_SETS };

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

/* what this processor lacks for a set, or NULL when it can run it */
static const char *kernel_set_lacks(size_t index) {
    const char *name = KERNEL_SETS[index]->name;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx2") && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()))
        return "the processor has no AVX2 with FMA and F16C";
#if defined(BITNET_REF_HAS_AVXVNNI)
    if (!strcmp(name, "avxvnni")) return avxvnni_lacks();
#endif
    if ((!strcmp(name, "avx512") || !strcmp(name, "amx")) &&
        !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && has_f16c()))
        return "the processor has no AVX-512 with VNNI";
#if defined(BITNET_REF_HAS_AMX)
    if (!strcmp(name, "amx")) return amx_lacks();
#endif
#elif defined(__aarch64__) && defined(__linux__)
    if (!strcmp(name, "dotprod") && !(getauxval(AT_HWCAP) & (1UL << 20))) return "the processor has no dot product";
#endif
    (void)name;
    return NULL;
}

/* The set's way to multiply such a matrix by tiles, or NULL. Their sums have another order than those of `dense_rows`, so this
 * depends on the matrix alone. */
static inline const tile_method *by_tiles(const kernel_set *set, int kind, size_t K) {
    if (!set->tiles[0].multiply || K == 0 || K % 32) return NULL;
    if (kind == 1) return set->tiles + TILES_OF_BFLOAT16;
    return Q8_0 <= kind && kind < Q6_K ? set->tiles + TILES_OF_BLOCKS : NULL; /* blocks_amx.h: not Q6_K */
}

/* the L2 cache of one core as the system reports it, or 1 MB */
static inline long l2_bytes(void) {
    long bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return bytes > 0 ? bytes : 1 << 20;
}

#endif
