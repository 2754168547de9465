/* AMX tiles in plain C, for ternary_amx.h, screen_amx.h, dense_amx.h, blocks_amx.h and attention_amx.h on a processor that has none: what Intel's manual
 * (volume 2, ldtilecfg, tileloadd, tilestored, tilezero, tdpbsud, tdpbssd, tdpbf16ps, tilerelease) says they do. Where the processor would fault,
 * this says why and ends. */
#ifndef BITNET_REF_AMX_EMULATED_H
#define BITNET_REF_AMX_EMULATED_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TILES = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

/* each thread has its own, as each processor has */
static _Thread_local struct {
    amx_config config;
    int configured;
    uint8_t bytes[TILES][TILE_ROWS][TILE_ROW_BYTES];
} tiles;

static void amx_check(int ok, const char *what) {
    if (ok) return;
    printf("AMX would fault: %s\n", what);
    exit(1);
}

static void amx_check_tile(int tile) {
    amx_check(tiles.configured, "tiles used before ldtilecfg, or after tilerelease");
    amx_check(tile >= 0 && tile < TILES, "no such tile");
    amx_check(tiles.config.rows[tile] && tiles.config.colsb[tile], "a tile is used that the configuration leaves out");
}

static void amx_configure(const amx_config *config) {
    amx_check(sizeof *config == 64, "the configuration is 64 bytes");
    amx_check(config->palette == 1, "palette 1 is the one there is");
    amx_check(config->start_row == 0, "start_row is the processor's own");
    for (size_t i = 0; i < sizeof config->reserved; i++) amx_check(config->reserved[i] == 0, "reserved bytes are 0");
    for (int tile = 0; tile < 16; tile++) {
        const int rows = config->rows[tile], colsb = config->colsb[tile];
        amx_check(tile < TILES || (rows == 0 && colsb == 0), "a tile beyond the eighth is configured");
        amx_check(rows <= TILE_ROWS && colsb <= TILE_ROW_BYTES, "a tile is larger than 16 rows by 64 bytes");
        amx_check((rows == 0) == (colsb == 0), "a tile has rows and no columns, or columns and no rows");
    }
    tiles.config = *config, tiles.configured = 1;
    memset(tiles.bytes, 0, sizeof tiles.bytes);
}

static void amx_release(void) { memset(&tiles, 0, sizeof tiles); }

/* Rows and bytes of a row beyond the tile's shape become 0, and are not read. */
static void amx_load(int tile, const void *base, size_t stride) {
    amx_check_tile(tile);
    memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]);
    for (size_t row = 0; row < tiles.config.rows[tile]; row++)
        memcpy(tiles.bytes[tile][row], (const char *)base + row * stride, tiles.config.colsb[tile]);
}

static void amx_zero(int tile) {
    amx_check_tile(tile);
    memset(tiles.bytes[tile], 0, sizeof tiles.bytes[tile]);
}

static void amx_store(int tile, void *base, size_t stride) {
    amx_check_tile(tile);
    for (size_t row = 0; row < tiles.config.rows[tile]; row++)
        memcpy((char *)base + row * stride, tiles.bytes[tile][row], tiles.config.colsb[tile]);
}

static void amx_check_product(int sum, int a, int b) {
    amx_check_tile(sum), amx_check_tile(a), amx_check_tile(b);
    amx_check(sum != a && sum != b && a != b, "the three tiles are not different ones");
    const amx_config *c = &tiles.config;
    amx_check(c->rows[sum] == c->rows[a], "sum and a have different numbers of rows");
    amx_check(c->colsb[sum] == c->colsb[b], "sum and b have rows of different sizes");
    amx_check(c->colsb[a] == 4 * c->rows[b], "a row of a is not as long as b is high");
    amx_check(c->colsb[a] % 4 == 0 && c->colsb[b] % 4 == 0 && c->colsb[sum] % 4 == 0, "rows are not whole words");
}

/* tdpbsud: sum[m][n] += a[m][4k + i] (signed) * b[k][4n + i] (unsigned), over k and i; 32 bits, no saturation. tdpbssd: b is
 * signed too. */
static void amx_dot(int sum, int a, int b, int is_signed) {
    amx_check_product(sum, a, b);
    const amx_config *c = &tiles.config;
    for (int m = 0; m < c->rows[sum]; m++)
        for (int n = 0; n < c->colsb[sum] / 4; n++) {
            uint32_t total;
            memcpy(&total, &tiles.bytes[sum][m][4 * n], 4);
            for (int k = 0; k < c->colsb[a] / 4; k++)
                for (int i = 0; i < 4; i++) {
                    const uint8_t v = tiles.bytes[b][k][4 * n + i];
                    total += (uint32_t)((int8_t)tiles.bytes[a][m][4 * k + i] * (is_signed ? (int8_t)v : (int)v));
                }
            memcpy(&tiles.bytes[sum][m][4 * n], &total, 4);
        }
}

static float amx_flushed(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0, v) : v; }

static float amx_bf16(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float v;
    memcpy(&v, &bits, 4);
    return amx_flushed(v);
}

/* tdpbf16ps: sum[m][n] += (the sum over k of a[m][2k] b[k][2n]) + (that of a[m][2k + 1] b[k][2n + 1]), each sum from 0 by
 * fused multiply-adds. Denormal numbers are taken as 0, and results flushed to it; the control register has no say. */
static void amx_dot_bf16(int sum, int a, int b) {
    amx_check_product(sum, a, b);
    for (int m = 0; m < tiles.config.rows[sum]; m++)
        for (int n = 0; n < tiles.config.colsb[sum] / 4; n++) {
            float of_place[2] = {0, 0}, total;
            for (int k = 0; k < tiles.config.colsb[a] / 4; k++)
                for (int i = 0; i < 2; i++)
                    of_place[i] = amx_flushed(fmaf(amx_bf16(&tiles.bytes[a][m][4 * k + 2 * i]),
                                                   amx_bf16(&tiles.bytes[b][k][4 * n + 2 * i]), of_place[i]));
            memcpy(&total, &tiles.bytes[sum][m][4 * n], 4);
            total = amx_flushed(amx_flushed(total) + amx_flushed(of_place[0] + of_place[1]));
            memcpy(&tiles.bytes[sum][m][4 * n], &total, 4);
        }
}

#define AMX_LOAD(tile, base, stride) amx_load(tile, base, stride)
#define AMX_LOAD_ONCE(tile, base, stride) amx_load(tile, base, stride)
#define AMX_STORE(tile, base, stride) amx_store(tile, base, stride)
#define AMX_ZERO(tile) amx_zero(tile)
#define AMX_DOT(sum, a, b) amx_dot(sum, a, b, 0)
#define AMX_DOT_SIGNED(sum, a, b) amx_dot(sum, a, b, 1)
#define AMX_DOT_BF16(sum, a, b) amx_dot_bf16(sum, a, b)

#endif
