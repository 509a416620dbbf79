// What few queries multiply with keys and values in their pages, without the detour over memory, in the order of native_amx.h: for
// pages that many queries read through the CPU's matrix unit. Built in chapter 14.
#ifdef IN_TILES

// Whether attention over these pages goes through the unit. Behind a window a row's keys begin anywhere within a tile.
static inline int uses_unit(const Pages *p) { return p->dim % TILE_INPUTS == 0 && !p->window && !p->sinks; }

enum {
    TOGETHER = 2 * TILE_ROWS,  // rows whose scores are made at once
    BLOCK = 192,               // keys whose scores are made before they become weights; in whole TILE_INPUTS and WIDTH
    UNIT_TILE = 192,           // queries of a tile, at most
};

enum { IN_UNIT = 3 };  // panels that one or two queries meet at once

// sums += what `rows` rows of x, floats, make of two inputs of `panels` times LANES outputs each.
#define ADD_PAIR(sum, x, stride, w0, w1)                                          \
    for (int r = 0; r < rows; r++)                                                \
        for (int p = 0; p < panels; p++) {                                        \
            sum[r][p].even = fused((x)[r * (stride)] - (lanes){}, w0[p], sum[r][p].even);     \
            sum[r][p].odd = fused((x)[r * (stride) + 1] - (lanes){}, w1[p], sum[r][p].odd);   \
        }

static inline __attribute__((always_inline)) void score_by_tiles(const int rows, const int panels, const C *const *at, long size,
                                                                 const float *q, long dim, float *scores, long stride) {
    lanes total[ROWS][IN_UNIT] = {};
    for (long from = 0; from < dim; from += TILE_INPUTS) {
        Halves sum[ROWS][IN_UNIT] = {};
        for (long d = from; d < from + TILE_INPUTS; d += 2) {
            lanes first[IN_UNIT], second[IN_UNIT];
            for (int p = 0; p < panels; p++) first[p] = key_lanes(at[p], d, size), second[p] = key_lanes(at[p], d + 1, size);
            ADD_PAIR(sum, q + d, dim, first, second)
        }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) total[r][p] += sum[r][p].even + sum[r][p].odd;
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(lanes *)(scores + r * stride + p * LANES) = total[r][p];
}

static inline __attribute__((always_inline)) void add_by_tiles(const int rows, const int panels, const C *const *at, long count,
                                                               long from, const float *weights, float *sums, long stride,
                                                               int begins) {
    lanes total[ROWS][IN_UNIT];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) total[r][p] = begins ? (lanes){} : *(lanes *)(sums + r * stride + p * LANES);
    for (long key = 0; key < count; key += TILE_INPUTS) {
        Halves sum[ROWS][IN_UNIT] = {};
        for (long k = key; k < key + TILE_INPUTS && k < count; k += 2) {
            lanes first[IN_UNIT], second[IN_UNIT];
            for (int p = 0; p < panels; p++) {
                first[p] = at[k] ? value_lanes(at[k], from + p * LANES) : (lanes){};
                second[p] = at[k + 1] ? value_lanes(at[k + 1], from + p * LANES) : (lanes){};
            }
            ADD_PAIR(sum, weights + k, BLOCK, first, second)
        }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++) total[r][p] += sum[r][p].even + sum[r][p].odd;
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(lanes *)(sums + r * stride + p * LANES) = total[r][p];
}
#undef ADD_PAIR

// `call` for `n` rows and all panels, one at a time where three would not leave their sums in registers.
#define BY_TILES(n, call)                              \
    case n:                                            \
        for (int p0 = 0; p0 < panels;) {               \
            enum { rows = n };                         \
            if (n > 2 || panels - p0 < IN_UNIT) {      \
                enum { some = 1 };                     \
                call;                                  \
                p0++;                                  \
            } else {                                   \
                enum { some = IN_UNIT };               \
                call;                                  \
                p0 += IN_UNIT;                         \
            }                                          \
        }                                              \
        break;

static __attribute__((noinline)) void score_few_by_tiles(int num_rows, int panels, const C *const *at, long size, const float *q,
                                                         long dim, float *scores, long stride) {
#define OF_ROWS(n) BY_TILES(n, score_by_tiles(rows, some, at + p0, size, q, dim, scores + p0 * LANES, stride))
    switch (num_rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}

static __attribute__((noinline)) void add_few_by_tiles(int num_rows, int panels, const C *const *at, long count, long from,
                                                       const float *weights, float *sums, long stride, int begins) {
#define OF_ROWS(n) \
    BY_TILES(n, add_by_tiles(rows, some, at, count, from + p0 * LANES, weights, sums + p0 * LANES, stride, begins))
    switch (num_rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}

#else
static inline int uses_unit(const Pages *p) { return (void)p, 0; }
enum { TOGETHER = 0, BLOCK = 384, UNIT_TILE = TILE };  // BLOCK in whole LANES and PAIRs
#endif

// Without the unit; 0: all keys are one block. The same for pages of any size, so that a row's bits do not depend on that either.
static inline long keys_of_block(const Pages *p) { return p->window || p->sinks ? 0 : BLOCK; }
