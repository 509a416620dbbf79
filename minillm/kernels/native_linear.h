// Matrix products: weights in groups of panels, multiplied in tiles whose sums stay in registers. Built in chapter 14.
//
// A panel is LANES outputs, and GROUP of them are a group. The weights of a group lie as they are read, from front to back:
// [in / PAIR][GROUP][LANES][PAIR], so a load brings the weights of LANES outputs for one input, of bfloat16 for two. The last
// group has the panels that are left.
//
//             a group's outputs, WIDTH              a tile: up to ROWS rows of x times a group, `in` multiplications deep
//            panel 0    panel 1    panel 2
//     row 0  [16 sums]  [16 sums]  [16 sums]        each weight is loaded once for ROWS rows, each x once for PANELS panels:
//     row 1  [16 sums]  [16 sums]  [16 sums]        11 loads for 24 multiplications of 16 (of bfloat16: 32) numbers
//     ...
//
// With 16 registers (AVX2) a group is one panel: six rows of it fill them. One row would leave most of them empty, and every
// addition waiting for the one before it, so one row takes PANELS groups at once, two or three rows take two (two rows of pairs
// that are multiplied in turns: see below).
//
// A sum begins with the first input and takes one after the other (in the CPU's matrix unit, tile after tile: native_amx.h),
// whatever the tile and whichever rows share it: a row's result never depends on its company.
#if defined(BF16) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define IN_PAIRS
#if defined(__AMX_BF16__) && !defined(NO_MATRIX_UNIT)
#define IN_TILES
#endif
enum { PAIR = 2, TURNS = 1 };
typedef __m512 accumulator;
typedef __m512i factors, operand, broadcast;
static inline factors load_factors(const T *weights) { return _mm512_loadu_si512(weights); }
static inline void store_factors(T *weights, factors w) { _mm512_storeu_si512(weights, w); }
static inline operand operand_of(factors w, int turn) { return (void)turn, w; }
static inline broadcast load_broadcast(const T *x, int turn) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (void)turn, _mm512_set1_epi32(pair);
}
static inline accumulator multiply_add(accumulator sum, broadcast x, operand w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}
static inline lanes as_lanes(accumulator sum) { return (lanes)sum; }
#elif defined(__AVX512F__)
enum { PAIR = 1, TURNS = 1 };
typedef lanes accumulator, factors, operand, broadcast;
static inline lanes as_lanes(accumulator sum) { return sum; }
static inline operand as_operand(lanes x) { return x; }
static inline factors load_factors(const T *weights) { return load_lanes(weights); }
static inline void store_factors(T *weights, factors w) { store_lanes(weights, w); }
static inline operand operand_of(factors w, int turn) { return (void)turn, w; }
static inline broadcast load_broadcast(const T *x, int turn) { return (void)turn, load(*x) - (lanes){}; }
static inline accumulator multiply_add(accumulator sum, broadcast x, operand w) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));  // gcc 12 moves registers for every third multiplication
    return sum;
}
#ifdef BF16
#define IS_WIDENED 1  // nothing multiplies bfloat16 here: many rows become floats once, and a group once for all rows
#endif
#else
typedef struct { part of[PARTS]; } accumulator, operand;
typedef part broadcast;
static inline lanes as_lanes(accumulator sum) {
    lanes x;
    memcpy(&x, &sum, sizeof x);
    return x;
}
static inline operand as_operand(lanes x) {
    operand w;
    memcpy(&w, &x, sizeof w);
    return w;
}
static inline accumulator multiply_add(accumulator sum, broadcast x, operand w) {
#if defined(__AVX2__) && defined(__FMA__)  // into the register of the sum: gcc 12 takes x's, moves, and keeps sums in memory
    for (int q = 0; q < PARTS; q++) __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum.of[q]) : "x"(x), "x"(w.of[q]));
#else
    for (int q = 0; q < PARTS; q++) sum.of[q] += x * w.of[q];
#endif
    return sum;
}
static inline operand load_operand(const T *numbers) {  // LANES of them, as floats
    operand w;
    for (int q = 0; q < PARTS; q++) w.of[q] = load_part(numbers + q * WIDE);
    return w;
}
#ifdef BF16
#define IN_TURNS
// Nothing multiplies bfloat16 here. Two inputs of an output share 32 bits, so that both become floats by one instruction each, for
// many outputs at once: shifted to the upper half, or with the lower half cleared. They are multiplied one after the other.
enum { PAIR = 2, TURNS = 2 };
typedef struct { int_part of[PARTS]; } factors;
static inline part in_turn(int_part both, int turn) { return (part)(turn ? both & -65536 : both << 16); }
static inline factors load_factors(const T *weights) { return *(const factors *)weights; }
static inline void store_factors(T *weights, factors w) { *(factors *)weights = w; }
static inline operand operand_of(factors both, int turn) {
    operand w;
    for (int q = 0; q < PARTS; q++) w.of[q] = in_turn(both.of[q], turn);
    return w;
}
static inline factors join(operand first, operand second) {  // numbers that bfloat16 has
    factors both;
    for (int q = 0; q < PARTS; q++)
        both.of[q] = ((int_part)first.of[q] >> 16 & 0xffff) | ((int_part)second.of[q] & -65536);
    return both;
}
static inline broadcast load_broadcast(const T *x, int turn) {
    int32_t both;
    memcpy(&both, x, 4);
    int_part all = both - (int_part){};
#ifdef __x86_64__
    __asm__("" : "+x"(all));  // gcc would shift the number first, and then take it from one kind of register to the other
#endif
    return in_turn(all, turn);
}
#else
enum { PAIR = 1, TURNS = 1 };
typedef operand factors;
static inline factors load_factors(const T *weights) { return load_operand(weights); }
static inline void store_factors(T *weights, factors w) {
    for (int q = 0; q < PARTS; q++) store_part(weights + q * WIDE, w.of[q]);
}
static inline operand operand_of(factors w, int turn) { return (void)turn, w; }
static inline broadcast load_broadcast(const T *x, int turn) { return (void)turn, load(*x) - (part){}; }
#endif
#endif

// PANELS: of a tile, at most. AT_ONCE: of a tile of so many rows. Chapter 14 compiles it with PANELS 1.
#ifdef __AVX512F__
#ifndef PANELS
#define PANELS 3
#endif
#define AT_ONCE(rows) PANELS
enum { GROUP = PANELS };
#define IN_REGISTER(x) __asm__("" : "+v"(x))  // gcc would load an x again for every panel
#define UNROLL_SUMS _Pragma("GCC unroll 8")  // gcc 12 would take the sums through memory before and after the loop
#else
#ifndef PANELS
#define PANELS 4
#endif
#define AT_ONCE(rows) (PANELS == 1 || rows > 4 - TURNS ? 1 : rows > 1 ? 2 : PANELS)
enum { GROUP = 1 };
#define IN_REGISTER(x)
#define UNROLL_SUMS
#endif
enum { WIDTH = PANELS * LANES };

int weight_pair(void) { return PAIR; }
int code_pair(void) { return PAIR / TURNS; }  // of inputs that low-bit weights become at once
int weight_panels(void) { return GROUP; }

// Weights are prefetched: the CPU's own reading ahead is made for loops that do nothing else. While few rows are multiplied, what
// comes AHEAD bytes later; with more rows, each pass over a group prefetches a part of the next group.
#ifndef AHEAD
#define AHEAD 8192  // chapter 14 compiles it with 0
#endif
enum {
#ifdef IN_TILES
    CHUNK = 256,  // the unit is done with 64 rows before memory has brought the next group
#else
    CHUNK = 64,   // rows that a group meets while it is in a near cache
#endif
#if defined(__AVX512F__) && !defined(IN_TILES)
    DEPTH = 1536,  // inputs of a group that fit there
#else
    DEPTH = 576,
#endif
};
// Not a function: gcc removes calls of one that only prefetches, as if it did nothing.
#define prefetch(place) __builtin_prefetch(place, 0, 3)
// Weights go into the second-level cache: in the first they would take the room of what is read now, and be gone before their turn.
#ifndef LOCALITY
#define LOCALITY 2  // chapter 14 compiles it with 3, the first-level cache
#endif
#define prefetch_weights(place) __builtin_prefetch(place, 0, LOCALITY)

typedef struct { long of[PANELS]; } Ahead;  // for each panel: which weights are prefetched, in bytes from those that are read
typedef struct { const char *at; long step; } Far;  // what is prefetched for later: from here on so many bytes with each step

// In a full tile the weights go into the first-level cache too, so many bytes before their turn: four steps of a tile of float32, of
// 12 cycles each, and the second-level cache takes 14 and more to answer.
#ifndef NEAR
#define NEAR 768  // chapter 14 compiles it with 0
#endif

// Begin or go on with the sums of a tile, its rows `sums_stride` apart. `step`: from the weights of one input to the next,
// `apart`: from one panel to the next, in numbers. `ahead` of NULL: the weights are in the second-level cache. Then `far_lines`
// lines of `far` are prefetched with each step, and one of `fed`, if that is not NULL.
static inline __attribute__((always_inline)) void multiply_tile(const int rows, const int panels, const T *x, long x_stride,
                                                                const T *weights, long step, long apart, long in,
                                                                float *sums, long sums_stride, int begins, const Ahead *ahead,
                                                                Far far, const int far_lines, const char *const *fed) {
    accumulator sum[ROWS][PANELS];
    UNROLL_SUMS
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            sum[r][p] = begins ? (accumulator){} : *(accumulator *)(sums + r * sums_stride + p * LANES);
    for (long i = 0; i < in; i += PAIR)
        for (int turn = 0; turn < TURNS; turn++) {
            operand w[PANELS];
            long at = i;
            if (turn) __asm__("" : "+r"(at));  // gcc would keep what the turn before has loaded, and sums in memory
            if (fed && turn == 0) prefetch_weights(fed[i / PAIR]);
            if (far_lines && turn == 0) {
                prefetch_weights(far.at);
                if (far_lines == 2) prefetch_weights(far.at + 64);
                far.at += far.step;
            }
            for (int p = 0; p < panels; p++) {
                const T *place = weights + at * step + p * apart;
                if (turn == 0 && ahead) prefetch_weights((const char *)place + ahead->of[p]);
                if (turn == 0 && !ahead) prefetch((const char *)place + NEAR);
                w[p] = operand_of(load_factors(place), turn);
            }
            for (int r = 0; r < rows; r++) {
                broadcast one = load_broadcast(x + r * x_stride + at, turn);
                IN_REGISTER(one);
                for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], one, w[p]);
            }
        }
    UNROLL_SUMS
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(accumulator *)(sums + r * sums_stride + p * LANES) = sum[r][p];
}

// What the compiler has to know as a constant, so that all sums stay in registers: every number of rows up to ROWS.
#ifdef __AVX512F__
#define FOR_EACH_ROWS(of) of(1) of(2) of(3) of(4) of(5) of(6) of(7) of(8)
#else
#define FOR_EACH_ROWS(of) of(1) of(2) of(3) of(4) of(5) of(6)
#endif

// Full tiles of up to PANELS panels that lie in the second-level cache.
static __attribute__((noinline)) void multiply_full(int panels, const T *x, long x_stride, const T *weights, long in, float *sums,
                                                    long sums_stride, int begins, Far far) {
#define OF_PANELS(n, lines) \
    multiply_tile(ROWS, n, x, x_stride, weights, n * LANES, PAIR * LANES, in, sums, sums_stride, begins, NULL, far, lines, NULL)
    if (panels == PANELS && far.step > 64) OF_PANELS(PANELS, 2);
    else if (panels == PANELS) OF_PANELS(PANELS, 1);
    else if (PANELS > 2 && panels == 2) OF_PANELS(2, 1);
    else OF_PANELS(1, 0);
#undef OF_PANELS
}

// Any number of rows up to ROWS, and `count` panels of groups that have `panels` of them; `along`: from one to the next.
static __attribute__((noinline)) void multiply_rows(int rows, int count, int panels, long along, const T *x, long x_stride,
                                                    const T *weights, long in, float *sums, long sums_stride, int begins,
                                                    Ahead ahead) {
    const long step = panels * LANES;
    int p = 0;
#define OF_TILE(n, count, step, apart)                                                                                            \
    multiply_tile(n, count, x, x_stride, weights + p * along, step, apart, in, sums + p * LANES, sums_stride, begins, &ahead, (Far){}, \
                  0, NULL)
#define OF_ROWS(n)                                                                                                                \
    case n:                                                                                                                       \
        if (GROUP == 1 || panels == GROUP)                                                                                        \
            for (; p + AT_ONCE(n) <= count; p += AT_ONCE(n))                                                                      \
                OF_TILE(n, AT_ONCE(n), GROUP > 1 ? GROUP * LANES : step, GROUP > 1 ? PAIR * LANES : along);                       \
        for (; GROUP > 2 && p + 2 <= count; p += 2) OF_TILE(n, 2, step, PAIR * LANES);                                            \
        for (; p < count; p++) OF_TILE(n, 1, step, 0);                                                                            \
        break;
    switch (rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
#undef OF_TILE
}

// Up to ROWS rows and up to PANELS panels side by side that were just written; a full tile of two panels or more prefetches `far`.
static inline void multiply_near(int rows, int panels, const T *x, long x_stride, const T *weights, long in, float *sums,
                                 long sums_stride, int begins, Far far) {
    if (GROUP > 1 && rows == ROWS) multiply_full(panels, x, x_stride, weights, in, sums, sums_stride, begins, far);
    else multiply_rows(rows, panels, panels, PAIR * LANES, x, x_stride, weights, in, sums, sums_stride, begins, (Ahead){});
}

#include "native_amx.h"

// `count` panels from panel `first` of a weight of `out` outputs: of one group, or, where that is one panel, of several.
typedef struct {
    long first, out;
    int count;
} Panels;

static inline int panels_beside(const Panels *of) {  // how many panels their group has
    long left = (of->out + LANES - 1) / LANES - of->first / GROUP * GROUP;
    return left < GROUP ? left : GROUP;
}

// What pass number `pass` over a group prefetches for `rows` rows: memory has all passes' time to bring the next group.
static inline Ahead prefetched_by(long pass, long rows, long in) {
    const long passes = (rows + ROWS - 1) / ROWS, share = passes < PANELS ? passes : PANELS;
    Ahead ahead = {};
    for (int p = 0; p < PANELS; p++)
        if (p * share / PANELS == pass) ahead.of[p] = passes == 1 ? AHEAD : GROUP * LANES * in * (long)sizeof(T);
    return ahead;
}

// What full tile number `tile` of `tiles` brings of the next group: each an equal part, in as many steps as the group has.
static inline Far far_part(const T *weights, long tile, long tiles, long in, long depth) {
    const long group = GROUP * LANES * (long)sizeof(T), step = (group * PAIR + tiles - 1) / tiles;
    return (Far){(const char *)weights + group * in + tile * (depth / PAIR) * step, step};
}

#include "native_feed.h"

#ifndef IS_WIDENED
#define IS_WIDENED 0
#endif
#if IS_WIDENED
static _Thread_local Workspace for_wide;

// As `multiply_full`, for numbers that are floats by now: the same sums.
static __attribute__((noinline)) void multiply_wide(const float *x, long x_stride, const float *weights, long in, float *sums,
                                                    int begins, Far far) {
    lanes sum[ROWS][GROUP];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < GROUP; p++) sum[r][p] = begins ? (lanes){} : *(lanes *)(sums + r * WIDTH + p * LANES);
    for (long i = 0; i < in; i++, weights += WIDTH, far.at += far.step) {
        lanes w[GROUP];
        prefetch_weights(far.at);
        for (int p = 0; p < GROUP; p++) {
            prefetch((const char *)(weights + p * LANES) + NEAR);
            w[p] = *(const lanes *)(weights + p * LANES);
        }
        for (int r = 0; r < ROWS; r++) {
            lanes one = x[r * x_stride + i] - (lanes){};
            IN_REGISTER(one);
            for (int p = 0; p < GROUP; p++) sum[r][p] = multiply_add(sum[r][p], one, w[p]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < GROUP; p++) *(lanes *)(sums + r * WIDTH + p * LANES) = sum[r][p];
}
#endif

// The same of a full tile. With each step it prefetches a line that the next layer's attention reads.
static __attribute__((noinline)) void multiply_fed(const T *x, long x_stride, const T *weights, long in, float *sums, int begins,
                                                   Far far) {
    const char *lines[DEPTH / PAIR];
    take_feed(lines, (in + PAIR - 1) / PAIR);
    multiply_tile(ROWS, GROUP, x, x_stride, weights, GROUP * LANES, PAIR * LANES, in, sums, WIDTH, begins, NULL, far, 1,
                  lines);
}

// sums [rows][WIDTH] = up to CHUNK rows of x [rows, in] times some panels. `wide`: these rows as floats, or NULL.
static void multiply_numbers(const T *x, const float *wide, long rows, const Panels *of, const T *weights, long in, float *sums) {
    int panels = panels_beside(of);
    long apart = GROUP > 1 ? PAIR * LANES : in * LANES;
    weights += of->first / GROUP * GROUP * LANES * in + of->first % GROUP * PAIR * LANES;
#ifdef IN_TILES
    for (long i = 0; i < in; i += DEPTH)
        multiply_tiles(rows, of->count, x + i, in, weights + i * panels * LANES, panels * LANES * PAIR, in - i < DEPTH ? in - i : DEPTH,
                       sums, WIDTH, i == 0, rows <= TILE_ROWS ? AHEAD : GROUP * LANES * in * (long)sizeof(T));
    return;
#endif
    const int in_full = GROUP > 1 && of->count == GROUP && rows >= 2 * ROWS;
    for (long i = 0; i < in; i += DEPTH) {
#if IS_WIDENED
        float *widened = wide && in_full ? reserve(&for_wide, DEPTH * WIDTH * sizeof(float) + 64) : NULL;
        if (widened) {
            widened += -(uintptr_t)widened % 64 / sizeof(float);
            widen(weights + i * WIDTH, (in - i < DEPTH ? in - i : DEPTH) * WIDTH, widened);
        }
#endif
        for (long row = 0; row < rows; row += ROWS) {
            long depth = in - i < DEPTH ? in - i : DEPTH, count = rows - row < ROWS ? rows - row : ROWS;
            const T *from = x + row * in + i, *block = weights + i * panels * LANES;
            float *to = sums + row * WIDTH;
            if (in_full && count == ROWS) {
                Far far = far_part(block, row / ROWS, rows / ROWS, in, depth);
#if IS_WIDENED
                if (widened) {
                    multiply_wide(wide + row * in + i, in, widened, depth, to, i == 0, far);
                    continue;
                }
#endif
                if (row && far.step <= 64 && is_fed()) multiply_fed(from, in, block, depth, to, i == 0, far);
                else multiply_full(GROUP, from, in, block, depth, to, WIDTH, i == 0, far);
            } else {
                multiply_rows(count, of->count, panels, apart, from, in, block, depth, to, WIDTH, i == 0,
                              in_full ? (Ahead){} : prefetched_by(row / ROWS, rows, in));
            }
        }
    }
}

// Where a product goes: out [rows, size] = sums + bias + residual [rows, size], if there are.
typedef struct {
    const T *bias, *residual;  // residual may be out
    T *out;
    long size;
    float *logits;  // in place of out: the same numbers, as float32
} Target;

// LANES outputs of a row to their place.
static inline void finish_lanes(const float *sums, const T *bias, const T *residual, T *out) {
    for (int q = 0; q < LANES; q += WIDE) {
        part sum = *(const part *)(sums + q);
        if (bias) sum += load_part(bias + q);
        if (residual) {
            T rounded[WIDE];
            store_part(rounded, sum);
            sum = load_part(rounded) + load_part(residual + q);
        }
        store_part(out + q, sum);
    }
}

// The last panel may reach beyond the outputs.
static __attribute__((noinline)) void finish_last(const float *sums, const T *bias, const T *residual, T *out, long width) {
    T part[3][LANES] = {};
    if (bias) memcpy(part[0], bias, width * sizeof(T));
    if (residual) memcpy(part[1], residual, width * sizeof(T));
    finish_lanes(sums, bias ? part[0] : NULL, residual ? part[1] : NULL, part[2]);
    memcpy(out, part[2], width * sizeof(T));
}

static inline void finish_logits(const float *sums, float *logits, long width) {
    T rounded[LANES];
    store_lanes(rounded, *(const lanes *)sums);
    const lanes wide = load_lanes(rounded);
    if (width >= LANES) memcpy(logits, &wide, sizeof wide);
    else memcpy(logits, &wide, width * sizeof(float));
}

// To their place: the sums of some panels for `rows` rows from `row`. Not inlined, so that a product is rounded before it is
// added to.
static __attribute__((noinline)) void finish(const float *sums, long row, long rows, const Panels *of, const Target *target) {
    for (long r = 0; r < rows; r++)
        for (int p = 0; p < of->count; p++) {
            long from = (of->first + p) * LANES, place = (row + r) * target->size + from, width = target->size - from;
            const T *bias = target->bias ? target->bias + from : NULL;
            const T *residual = target->residual ? target->residual + place : NULL;
            const float *sum = sums + r * WIDTH + p * LANES;
            if (target->logits) finish_logits(sum, target->logits + place, width);
            else if (width >= LANES) finish_lanes(sum, bias, residual, target->out + place);
            else finish_last(sum, bias, residual, target->out + place, width);
        }
}
