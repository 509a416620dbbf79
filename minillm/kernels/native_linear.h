// Matrix products with few rows: weights in panels that are read once, from front to back. Built in chapter 14.

// Weights of a linear layer lie in panels of LANES outputs, [panels][in / PAIR][LANES][PAIR]: a panel is read once,
// from front to back, and every load brings one input's weight (of bfloat16 two inputs') for LANES outputs.
#if defined(BF16) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define IN_PAIRS
enum { PAIR = 2 };
typedef __m512 accumulator;
typedef __m512i factors;
static inline factors load_factors(const T *weights) { return _mm512_loadu_si512(weights); }
static inline void store_factors(T *weights, factors w) { _mm512_storeu_si512(weights, w); }
static inline accumulator multiply_add(accumulator sum, const T *x, factors w) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
}
#else
enum { PAIR = 1 };
typedef lanes accumulator, factors;
static inline factors load_factors(const T *weights) { return load_lanes(weights); }
static inline void store_factors(T *weights, factors w) { store_lanes(weights, w); }
static inline accumulator multiply_add(accumulator sum, const T *x, factors w) { return sum + load(*x) * w; }
#endif

int weight_pair(void) { return PAIR; }

// Weights are asked for before they are needed: the CPU's own reading ahead is made for loops that do nothing else. One or two
// rows wait for memory alone, and it brings no more if it is asked twice. A few rows take what is 4 KiB ahead into the nearest
// cache; more rows take longer over it, and it can come from further away, into the second one.
#ifndef AHEAD_FROM
#define AHEAD_FROM 3  // rows; chapter 14 compiles it without
#endif
enum { AHEAD = 8192, FEW_ROWS = 5 };
static inline void ask_for(const void *place) { __builtin_prefetch(place, 0, 2); }
static inline void ask_soon(const void *place) { __builtin_prefetch(place, 0, 3); }

// One panel times up to ROWS rows of x; the weights `ahead` bytes on are asked for. Every row takes two chains of additions,
// so that none waits for the one before, whatever the number of rows: a row's result never depends on its company.
static inline __attribute__((always_inline)) void multiply_panel(const int rows, const T *x, long x_stride, const T *panel,
                                                                 lanes *sums, long in, long ahead) {
    accumulator sum[ROWS][2] = {};
    long i = 0;
    for (; i + 2 * PAIR <= in; i += 2 * PAIR)
        for (int c = 0; c < 2; c++) {
            const T *weights = panel + (i + c * PAIR) * LANES;
            if (rows <= FEW_ROWS) ask_soon((const char *)weights + ahead);
            else ask_for((const char *)weights + ahead);
            for (int r = 0; r < rows; r++)
                sum[r][c] = multiply_add(sum[r][c], x + r * x_stride + i + c * PAIR, load_factors(weights));
        }
    for (; i < in; i += PAIR)
        for (int r = 0; r < rows; r++) sum[r][0] = multiply_add(sum[r][0], x + r * x_stride + i, load_factors(panel + i * LANES));
    for (int r = 0; r < rows; r++) sums[r] = (lanes)sum[r][0] + (lanes)sum[r][1];
}

// To its place in out [rows, out_features]: what the panel of the outputs from `first` gave for up to ROWS rows from `row`,
// plus bias, plus residual [rows, out_features] if there are. Not inlined, so that a product is rounded before it is added to.
static __attribute__((noinline)) void finish(const lanes *sums, int rows, const T *bias, const T *residual, T *out, long row,
                                             long first, long out_features) {
    long width = out_features - first < LANES ? out_features - first : LANES;
    for (int r = 0; r < rows; r++) {
        long place = (row + r) * out_features + first;
        T last[3][LANES] = {};  // the last panel may reach beyond the outputs
        T *to = out + place;
        const T *plus = bias ? bias + first : NULL, *rest = residual ? residual + place : NULL;
        if (width < LANES) {
            to = last[0];
            if (bias) plus = memcpy(last[1], plus, width * sizeof(T));
            if (residual) rest = memcpy(last[2], rest, width * sizeof(T));
        }
        lanes sum = sums[r];
        if (bias) sum += load_lanes(plus);
        if (residual) {
            T rounded[LANES];
            store_lanes(rounded, sum);
            sum = load_lanes(rounded) + load_lanes(rest);
        }
        store_lanes(to, sum);
        if (width < LANES) memcpy(out + place, to, width * sizeof(T));
    }
}

// out [rows, out_features] = x [rows, in] times the weights, plus bias and plus residual [rows, out_features] if there are.
// `in` is a multiple of PAIR; residual may be out.
void linear(const T *x, const T *panels, const T *bias, const T *residual, T *out, long rows, long out_features, long in) {
    enum { CHUNK = 64 };  // rows that a panel meets while it is in a near cache
    long num_panels = (out_features + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) if (rows * in * out_features > 65536)
    for (long from = 0; from < rows; from += CHUNK)
        for (long n = 0; n < num_panels; n++) {
            const T *panel = panels + n * in * LANES;
            long to = from + CHUNK < rows ? from + CHUNK : rows;
            for (long row = from; row < to; row += ROWS) {
                const T *first = x + row * in;
                lanes sums[ROWS];
                int count = to - row < ROWS ? to - row : ROWS;
                // While the first of many rows are multiplied, the next panel comes; alone, they look ahead in their own.
                long ahead = count < AHEAD_FROM ? 0 : count <= FEW_ROWS ? AHEAD / 2 : AHEAD;
                if (to - from > ROWS) ahead = row == from ? in * LANES * (long)sizeof(T) : 0;
                switch (count) {
                    case 1: multiply_panel(1, first, in, panel, sums, in, ahead); break;
                    case 2: multiply_panel(2, first, in, panel, sums, in, ahead); break;
                    case 3: multiply_panel(3, first, in, panel, sums, in, ahead); break;
                    case 4: multiply_panel(4, first, in, panel, sums, in, ahead); break;
                    case 5: multiply_panel(5, first, in, panel, sums, in, ahead); break;
                    case 6: multiply_panel(6, first, in, panel, sums, in, ahead); break;
                    case 7: multiply_panel(7, first, in, panel, sums, in, ahead); break;
                    default: multiply_panel(8, first, in, panel, sums, in, ahead);
                }
                finish(sums, count, bias, residual, out, row, n * LANES, out_features);
            }
        }
}
