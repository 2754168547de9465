// The device's functions on the host: shuffles and votes of a warp, mma, atomics, intrinsics. See emulated.h. Only the
// functions that kernels use are here; add what a new kernel needs.
#pragma once
#include "emulated.h"

template <typename To, typename From> static To emulated_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

// -- warps ------------------------------------------------------------------------------------------------------------

namespace emulated {

template <typename T> struct Shuffle { T value, result; int source; };  // source: a lane, or -1: its own value

template <typename T> static void finish_shuffle(Warp &warp, unsigned mask) {
    for (unsigned lane = 0; lane < warp.count; lane++) {
        if (!(mask >> lane & 1)) continue;
        auto &mine = warp.payload<Shuffle<T>>(lane);
        const unsigned source = mine.source < 0 ? lane : unsigned(mine.source);
        if (source >= warp.count || !(mask >> source & 1)) {
            fail("thread %u: a shuffle from lane %u, which takes no part in it", warp.lanes[lane].number, source);
            return;
        }
        mine.result = warp.payload<Shuffle<T>>(source).value;
    }
}

template <typename T> static T exchange(unsigned mask, T value, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    Shuffle<T> mine{value, value, source};
    collective("__shfl_sync", mask, finish_shuffle<T>, &mine);
    return mine.result;
}

static inline int own_lane() { return machine.current->number % 32; }

struct Vote { unsigned value, result; };

static void finish_ballot(Warp &warp, unsigned mask) {
    unsigned votes = 0;
    for (unsigned lane = 0; lane < warp.count; lane++)
        if (mask >> lane & 1 && warp.payload<Vote>(lane).value) votes |= 1u << lane;
    for (unsigned lane = 0; lane < warp.count; lane++)
        if (mask >> lane & 1) warp.payload<Vote>(lane).result = votes;
}

static void finish_nothing(Warp &, unsigned) {}

template <typename T, typename Combine> static T reduce(unsigned mask, T value, Combine combine) {
    T all[32], result = value;  // by shuffles: the same on every lane
    bool first = true;
    for (int source = 0; source < 32; source++)
        if (mask >> source & 1) {
            all[source] = exchange(mask, value, source);
            result = first ? all[source] : combine(result, all[source]);
            first = false;
        }
    return result;
}

}  // namespace emulated

template <typename T> static T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int base = emulated::own_lane() & ~(width - 1);
    return emulated::exchange(mask, value, base + (source & (width - 1)));
}
template <typename T> static T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const int source = emulated::own_lane() ^ bits, end = (emulated::own_lane() & ~(width - 1)) + width;
    return emulated::exchange(mask, value, source < end ? source : -1);
}
static inline unsigned __ballot_sync(unsigned mask, int value) {
    emulated::Vote mine{value != 0, 0};
    emulated::collective("__ballot_sync", mask, emulated::finish_ballot, &mine);
    return mine.result;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    emulated::collective("__syncwarp", mask, emulated::finish_nothing, nullptr);
}
static inline int __reduce_max_sync(unsigned mask, int value) {
    return emulated::reduce(mask, value, [](int a, int b) { return std::max(a, b); });
}

// -- mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 ------------------------------------------------------------------

namespace emulated {

static bool is_whole(Warp &warp, unsigned mask) {
    if (mask == 0xffffffffu && warp.count == 32) return true;
    fail("thread %u: mma.sync needs all 32 lanes, and has 0x%08x", warp.lanes[0].number, mask);
    return false;
}

struct Mma { int *d; const unsigned *a, *b; };

/* D = A B + D, the fragments as the PTX ISA lays them out ("Matrix Fragments for mma.m16n8k32", 8-bit types):
 *
 *   groupID = laneid / 4, threadID_in_group = laneid % 4
 *   A, four registers of four .s8, a0 .. a15:  row = groupID            for a0-a3 and a8-a11, else groupID + 8
 *                                              col = threadID_in_group * 4 + (i & 3)      for i < 8, else that + 16
 *   B, two registers of four .s8, b0 .. b7:    row = threadID_in_group * 4 + (i & 3)      for i < 4, else that + 16
 *                                              col = groupID
 *   C and D, four .s32, c0 .. c3:              row = groupID for i < 2, else groupID + 8
 *                                              col = threadID_in_group * 2 + (i & 1)                              */
static void finish_mma(Warp &warp, unsigned mask) {
    if (!is_whole(warp, mask)) return;
    int8_t a[16][32], b[8][32];  // b by columns
    for (int lane = 0; lane < 32; lane++) {
        const Mma &mine = warp.payload<Mma>(lane);
        const int group = lane / 4, thread = lane % 4;
        for (int i = 0; i < 16; i++) {
            const int row = (i < 4 || (8 <= i && i < 12)) ? group : group + 8;
            a[row][thread * 4 + (i & 3) + (i < 8 ? 0 : 16)] = int8_t(mine.a[i / 4] >> 8 * (i & 3));
        }
        for (int i = 0; i < 8; i++)
            b[group][thread * 4 + (i & 3) + (i < 4 ? 0 : 16)] = int8_t(mine.b[i / 4] >> 8 * (i & 3));
    }
    for (int lane = 0; lane < 32; lane++) {
        const Mma &mine = warp.payload<Mma>(lane);
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + (i < 2 ? 0 : 8), col = lane % 4 * 2 + (i & 1);
            int sum = 0;
            for (int k = 0; k < 32; k++) sum += a[row][k] * b[col][k];
            mine.d[i] = int(unsigned(mine.d[i]) + unsigned(sum));  // wraps, as without .satfinite
        }
    }
}

static inline void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    Mma mine{d, a, b};
    collective("mma.sync.m16n8k32", 0xffffffffu, finish_mma, &mine);
}

// -- mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64, sixteen at once: four A, for each four B ------------------------

struct Mma64 { double (*d)[2]; const double *a, (*b)[4]; };

/* D[i] = A[m] B[i][m] + D[i] for m = 0 .. 3 ("Matrix Fragments for mma.m8n8k4 with .f64 floating point type"):
 *
 *   A, one .f64:       row = laneid / 4, col = laneid % 4
 *   B, one .f64:       row = laneid % 4, col = laneid / 4
 *   C and D, two:      row = laneid / 4, col = laneid % 4 * 2 + i                                                    */
static void finish_mma_f64(Warp &warp, unsigned mask) {
    if (!is_whole(warp, mask)) return;
    double a[8][16], b[4][16][8], d[4][8][8];
    for (int lane = 0; lane < 32; lane++) {
        const Mma64 &mine = warp.payload<Mma64>(lane);
        for (int m = 0; m < 4; m++) {
            a[lane / 4][m * 4 + lane % 4] = mine.a[m];
            for (int i = 0; i < 4; i++) b[i][m * 4 + lane % 4][lane / 4] = mine.b[i][m];
        }
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) d[i][lane / 4][lane % 4 * 2 + e] = mine.d[i][e];
    }
    for (int i = 0; i < 4; i++)
        for (int row = 0; row < 8; row++)
            for (int k = 0; k < 16; k++)
                for (int col = 0; col < 8; col++) d[i][row][col] += a[row][k] * b[i][k][col];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) warp.payload<Mma64>(lane).d[i][e] = d[i][lane / 4][lane % 4 * 2 + e];
}

static inline void mma_m8n8k4_f64(double (&d)[4][2], const double (&a)[4], const double (&b)[4][4]) {
    Mma64 mine{d, a, b};
    collective("mma.sync.m8n8k4", 0xffffffffu, finish_mma_f64, &mine);
}

// -- mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 --------------------------------------------------------------

typedef float Floats __attribute__((vector_size(16), may_alias));  // four rows of a column
typedef int Ints __attribute__((vector_size(16)));
typedef unsigned Words __attribute__((vector_size(16)));
struct Column {
    Floats rows[4];
    float &operator[](int row) { return reinterpret_cast<float *>(rows)[row]; }
};

/* c += the sum of a[k] b[k], as tensor cores add (Fasi, Higham, Mikaitis, Pranesh: "Numerical behavior of NVIDIA tensor
 * cores", 2021): the products are exact; all terms are cut, toward zero, at the last of the 24 bits that the largest
 * has; their sum is exact, and cut to 24 bits again. So of a V100; later cards keep a bit or more below the last, and
 * are nearer to the exact sum. (Of terms that are all below 1e-30 more is lost than there.) */
static inline void add_as_tensor_cores(Column &sums, const Column (&a)[16], const float (&b)[16]) {
    for (int i = 0; i < 4; i++) {
        Floats terms[17], &c = sums.rows[i], plain = {}, largest = plain + 1e-30f;
        for (int k = 0; k < 17; k++) {
            terms[k] = k < 16 ? a[k].rows[i] * b[k] : c;
            const Floats size = Floats(Words(terms[k]) & 0x7fffffffu);
            largest = size > largest ? size : largest;
            plain += terms[k];
        }
        const Words exponent = Words(largest) & 0x7f800000u;
        const Floats scale = Floats((277u << 23) - exponent);  // makes the last bit of the largest a one
        Words sum = {};
        for (int k = 0; k < 17; k++) sum += Words(__builtin_convertvector(terms[k] * scale, Ints));
        const Ints size = Ints(Ints(sum) < 0 ? 0u - sum : sum);
        Floats cut = __builtin_convertvector(size, Floats);  // rounded, up where that gives more
        cut = Floats(Words(cut) + Words(__builtin_convertvector(cut, Ints) > size)) * Floats(exponent - (23u << 23));
        c = plain - plain == 0 ? Floats(Words(cut) | (sum & 0x80000000u)) : plain;  // NaN and Inf as they are
    }
}

/* D = A B + D, the fragments as the PTX ISA lays them out ("Matrix Fragments for mma.m16n8k16 with floating point
 * type", .bf16), g = groupID and t = threadID_in_group as above:
 *
 *   A, four registers of two .bf16, a0 .. a7:  row = g for a0, a1, a4, a5, else g + 8
 *                                              col = t * 2 + (i & 1)      for i < 4, else that + 8
 *   B, two registers of two .bf16, b0 .. b3:   row = t * 2 + (i & 1)      for i < 2, else that + 8
 *                                              col = g
 *   C and D, four .f32, c0 .. c3:              row = g for i < 2, else g + 8;   col = t * 2 + (i & 1)             */
template <int R, int C, int STEPS> struct MmaBf16 {
    float (&d)[R][C][4];
    const unsigned (&a)[R][STEPS][4], (&b)[C][STEPS][2];
};

template <int R, int C, int STEPS> static void finish_mma_bf16(Warp &warp, unsigned mask) {
    if (!is_whole(warp, mask)) return;
    Column a[R][STEPS][16];
    float b[C][8][STEPS][16];
    for (int lane = 0; lane < 32; lane++) {
        const auto &mine = warp.payload<MmaBf16<R, C, STEPS>>(lane);
        const int g = lane / 4, t = lane % 4;
        for (int step = 0; step < STEPS; step++) {
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 4; i++) {  // a[2i], a[2i + 1]
                    Column *const columns = a[r][step] + 2 * t + (i < 2 ? 0 : 8);
                    columns[0][g + i % 2 * 8] = emulated_bits<float>(mine.a[r][step][i] << 16);
                    columns[1][g + i % 2 * 8] = emulated_bits<float>(mine.a[r][step][i] & 0xffff0000u);
                }
            for (int c = 0; c < C; c++)
                for (int i = 0; i < 2; i++) {
                    float *const rows = b[c][g][step] + 2 * t + 8 * i;
                    rows[0] = emulated_bits<float>(mine.b[c][step][i] << 16);
                    rows[1] = emulated_bits<float>(mine.b[c][step][i] & 0xffff0000u);
                }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            Column before[8], d[8];
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++)
                    before[lane % 4 * 2 + i % 2][lane / 4 + (i < 2 ? 0 : 8)] =
                        warp.payload<MmaBf16<R, C, STEPS>>(lane).d[r][c][i];
            for (int column = 0; column < 8; column++) {
                const int last = column - 1;  // what equals it has the same sums
                const bool again = column > 0 && memcmp(b[c][column], b[c][last], sizeof b[c][0]) == 0 &&
                                   memcmp(&before[column], &before[last], sizeof d[0]) == 0;
                d[column] = again ? d[last] : before[column];
                for (int step = 0; step < STEPS && !again; step++)
                    add_as_tensor_cores(d[column], a[r][step], b[c][column][step]);
            }
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++)
                    warp.payload<MmaBf16<R, C, STEPS>>(lane).d[r][c][i] =
                        d[lane % 4 * 2 + i % 2][lane / 4 + (i < 2 ? 0 : 8)];
        }
}

template <int R, int C, int STEPS>
static void mma_m16n8k16_bf16(float (&d)[R][C][4], const unsigned (&a)[R][STEPS][4],
                              const unsigned (&b)[C][STEPS][2]) {
    MmaBf16<R, C, STEPS> mine{d, a, b};
    collective("mma.sync.m16n8k16", 0xffffffffu, finish_mma_bf16<R, C, STEPS>, &mine);
}

}  // namespace emulated

// -- atomics: one host thread runs everything -------------------------------------------------------------------------

template <typename T> static T atomicAdd(T *place, T value) {
    const T old = *place;
    *place = old + value;
    return old;
}
template <typename T> static T atomicMax(T *place, T value) {
    const T old = *place;
    *place = std::max(old, value);
    return old;
}
template <typename T> static T atomicCAS(T *place, T expected, T value) {
    const T old = *place;
    if (old == expected) *place = value;
    return old;
}
static inline void __threadfence() {}

// -- loads and stores with a cache hint -------------------------------------------------------------------------------

template <typename T> static T __ldcg(const T *place) { return *place; }
template <typename T> static T __ldcs(const T *place) { return *place; }

// -- integers ---------------------------------------------------------------------------------------------------------

static inline int __dp4a(int a, int b, int c) {
    int sum = 0;
    for (int i = 0; i < 32; i += 8) sum += int8_t(a >> i) * int8_t(b >> i);
    return int(unsigned(c) + unsigned(sum));
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned choice = selector >> 4 * i & 15;
        unsigned byte = both >> 8 * (choice & 7) & 255;
        if (choice & 8) byte = byte & 128 ? 255 : 0;  // prmt's sign mode
        result |= byte << 8 * i;
    }
    return result;
}
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
#define EMULATED_MINMAX(type)                                                                                         \
    static inline type min(type a, type b) { return b < a ? b : a; }                                                  \
    static inline type max(type a, type b) { return a < b ? b : a; }
EMULATED_MINMAX(int)
EMULATED_MINMAX(unsigned)
EMULATED_MINMAX(long long)
EMULATED_MINMAX(unsigned long long)
#undef EMULATED_MINMAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

// -- floats: each rounded once, to nearest, as the device does with --fmad=false --------------------------------------

static inline float __int_as_float(int x) { return emulated_bits<float>(x); }
static inline int __float_as_int(float x) { return emulated_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

static inline float __int2float_rn(int x) { return float(x); }
