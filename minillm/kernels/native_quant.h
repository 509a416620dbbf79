// Matrix products with low-bit weights: decoded in registers, on the way from memory to the multiplication. Built in
// chapter 15. `native_codes.h` has the codes.

// Panels whose sums stay in registers, beside what decoding takes.
#ifdef __AVX512F__
#define DECODED_AT_ONCE(kind, rows) (PANELS < 3 ? PANELS : rows <= 5 || kind != NIBBLES ? 3 : 2)
#else
#define DECODED_AT_ONCE(kind, rows) (PANELS > 1 && rows == 1 ? 2 : 1)
#endif
#ifndef DECODE_FROM  // rows from which panels are decoded first, and once: decoding takes long without AVX-512
#ifdef __AVX512F__
#define DECODE_FROM 33
#else
#define DECODE_FROM 4
#endif
#endif
#ifndef DECODED_GROUP  // inputs of a group at least, for shorter ones are scaled too often
#ifdef __AVX512F__
#define DECODED_GROUP SPAN
#else
#define DECODED_GROUP 32
#endif
#endif
#ifdef IN_TILES  // more rows than FEW_CODES are multiplied in the matrix unit
enum { ALL_DECODED = 1 };
#else
enum { ALL_DECODED = 0, TILE_ROWS = ROWS };
#endif

// Spans have SPAN inputs, but for the last one of a group.
static inline long span_end(const Matrix *m, long i) {
    long end = (i / m->group + 1) * m->group;
    if (end > m->in) end = m->in;
    return end < i + SPAN ? end : i + SPAN;
}

static inline long spans_of(const Matrix *m) {
    return m->in / m->group * ((m->group + SPAN - 1) / SPAN) + (m->in % m->group + SPAN - 1) / SPAN;
}

// `panels` panels of `of`, from its p0-th on, times up to ROWS rows of x, their codes decoded on the way: few rows wait for
// memory. The order of additions is the same for any number of rows and for spans that are decoded first, so that a row's
// result never depends on its company.
static inline __attribute__((always_inline)) void multiply_codes(const int rows, const int panels, const int kind, const Matrix *m,
                                                                 const Panels *of, int p0, const T *x, const float *x_sums,
                                                                 float *sums) {
    const long spans = spans_of(m), apart = panels_apart(m, kind), step = panels_beside(of) * step_bytes(kind);
    const uint8_t *codes = codes_of_panel(m, of->first + p0);
    Total total[ROWS][PANELS] = {};
    for (long s = 0, i = 0; s < spans; s++) {
        long end = span_end(m, i);
        Side sides[PANELS];
        for (int p = 0; p < panels; p++) sides[p] = side_of(m, of->first + p0 + p, i);
        accumulator sum[ROWS][PANELS] = {};
        for (; i < end; i += STEP, codes += step) {
            for (long b = 0; b < GROUP * step_bytes(kind) && (p0 == 0 || GROUP == 1); b += 64)  // of the group
                for (int p = 0; p < (GROUP > 1 ? 1 : panels); p++) prefetch_weights(codes + p * apart + b + AHEAD);
            UNROLL_CODES
            for (int c = 0; c < STEP / CODE_PAIR; c += 2) {
                operand w[PANELS][2];
                for (int p = 0; p < panels; p++) decode(kind, codes + p * apart, c, m->table, w[p]);
                for (int k = 0; k < 2; k++)
                    for (int r = 0; r < rows; r++) {
                        broadcast one = input_of_code(x + r * m->in + i, c, k);
                        IN_REGISTER(one);
                        for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], one, w[p][k]);
                    }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++)
                total[r][p] = add_span(total[r][p], sum[r][p], m, &sides[p], m->zeros ? x_sums[r * spans + s] : 0);
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(Total *)(sums + r * WIDTH + p * LANES) = total[r][p];
}

#ifdef IN_TILES
// The same in the order of native_amx.h, for so few rows that writing the values of a span for the unit would take longer.
enum { FEW_CODES = 2 };

static inline __attribute__((always_inline)) void multiply_codes_by_tiles(const int rows, const int panels, const int kind,
                                                                          const Matrix *m, const Panels *of, int p0, const T *x,
                                                                          const float *x_sums, float *sums) {
    const long spans = spans_of(m), apart = panels_apart(m, kind), step = panels_beside(of) * step_bytes(kind);
    const uint8_t *codes = codes_of_panel(m, of->first + p0);
    const ints upper = -65536 - (ints){};
    lanes total[FEW_CODES][PANELS] = {};
    for (long s = 0, i = 0; s < spans; s++) {
        long begin = i, end = span_end(m, i);
        lanes sum[FEW_CODES][PANELS] = {};
        while (i < end) {
            Halves half[FEW_CODES][PANELS] = {};
            for (long stop = i + TILE_INPUTS < end ? i + TILE_INPUTS : end; i < stop; i += STEP, codes += step) {
                for (long b = 0; b < GROUP * step_bytes(kind) && p0 == 0; b += 64) prefetch_weights(codes + b + AHEAD);
#pragma GCC unroll 2
                for (int c = 0; c < STEP / CODE_PAIR; c += 2) {
                    operand w[PANELS][2];
                    for (int p = 0; p < panels; p++) decode(kind, codes + p * apart, c, m->table, w[p]);
                    for (int k = 0; k < 2; k++)
                        for (int r = 0; r < rows; r++) {
                            ints pair = (ints)input_of_code(x + r * m->in + i, c, k);
                            lanes even = (lanes)(pair << 16), odd = (lanes)(pair & upper);
                            for (int p = 0; p < panels; p++) {
                                half[r][p].even = fused(even, (lanes)((ints)w[p][k] << 16), half[r][p].even);
                                half[r][p].odd = fused(odd, (lanes)((ints)w[p][k] & upper), half[r][p].odd);
                            }
                        }
                }
            }
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < panels; p++) sum[r][p] += half[r][p].even + half[r][p].odd;
        }
        for (int p = 0; p < panels; p++) {
            Side side = side_of(m, of->first + p0 + p, begin);
            for (int r = 0; r < rows; r++)
                total[r][p] = add_span(total[r][p], (accumulator)sum[r][p], m, &side, m->zeros ? x_sums[r * spans + s] : 0);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(lanes *)(sums + r * WIDTH + p * LANES) = total[r][p];
}

static __attribute__((noinline)) void multiply_few_codes(int rows, const int kind, const Matrix *m, const Panels *of, const T *x,
                                                         const float *x_sums, float *sums) {
    int p = 0;
#define OF_ROWS(n, most)                                                                                                       \
    case n:                                                                                                                    \
        for (; p + most <= of->count; p += most) multiply_codes_by_tiles(n, most, kind, m, of, p, x, x_sums, sums + p * LANES); \
        for (; p < of->count; p++) multiply_codes_by_tiles(n, 1, kind, m, of, p, x, x_sums, sums + p * LANES);                 \
        break;
#define OF_KIND(kind)                                                                                                          \
    case kind: switch (rows) { OF_ROWS(1, PANELS) OF_ROWS(2, PANELS) } break;
    switch (kind) { OF_KIND(NIBBLES) OF_KIND(BYTES) }
#undef OF_KIND
#undef OF_ROWS
}
#endif

static inline __attribute__((always_inline)) void multiply_codes_of(int rows, const int kind, const Matrix *m, const Panels *of,
                                                                    const T *x, const float *x_sums, float *sums) {
    int p = 0;
#define OF_ROWS(n)                                                                                         \
    case n:                                                                                                \
        for (; p + DECODED_AT_ONCE(kind, n) <= of->count; p += DECODED_AT_ONCE(kind, n))                   \
            multiply_codes(n, DECODED_AT_ONCE(kind, n), kind, m, of, p, x, x_sums, sums + p * LANES);      \
        for (; p < of->count; p++) multiply_codes(n, 1, kind, m, of, p, x, x_sums, sums + p * LANES);      \
        break;
    switch (rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}

static inline __attribute__((always_inline)) void decode_span_of(const int kind, const uint8_t *codes, const uint8_t *table,
                                                                 long apart, T *values, long step, long in, long ahead) {
    for (long i = 0; i < in; i += STEP, codes += apart) {
        for (long b = 0; b < step_bytes(kind); b += 64) prefetch_weights(codes + b + ahead);
        UNROLL_CODES
        for (int c = 0; c < STEP / CODE_PAIR; c += 2) {
            operand w[2];
            decode(kind, codes, c, table, w);
            store_two(values + (i + c * CODE_PAIR) * step, w, step);
        }
    }
}

// The values of `in` codes from input `first` of panel n, unscaled, as native_linear.h has weights; `step` from one input to the
// next, in numbers.
static void decode_span(const Matrix *m, const Panels *of, long n, long first, long in, T *values, long step) {
    long apart = panels_beside(of) * step_bytes(m->kind), ahead = apart * (m->in / STEP);  // the next group's
    const uint8_t *codes = codes_of_panel(m, n) + first / STEP * apart;
    switch (m->kind) {
        case NIBBLES: decode_span_of(NIBBLES, codes, m->table, apart, values, step, in, ahead); break;
        case BYTES: decode_span_of(BYTES, codes, m->table, apart, values, step, in, ahead); break;
        default: decode_span_of(FLOATS, codes, m->table, apart, values, step, in, ahead);
    }
}

#ifdef __AVX512F__
// Up to CHUNK rows of x times some panels, which are decoded span by span, once for all rows.
static void multiply_decoded(const Matrix *m, const Panels *of, const T *x, long rows, const float *x_sums, float *sums) {
    T values[SPAN * WIDTH] __attribute__((aligned(64)));
    enum { PART = ALL_DECODED ? TILE_ROWS : ROWS };  // rows at once
    float made[PART * WIDTH] __attribute__((aligned(64)));
    const long spans = spans_of(m);
    for (long i = 0, s = 0, in; i < m->in; i += in, s++) {
        in = span_end(m, i) - i;
        Side sides[PANELS];
        for (int p = 0; p < of->count; p++) {
            decode_span(m, of, of->first + p, i, in, values + p * PAIR * LANES, of->count * LANES);
            sides[p] = side_of(m, of->first + p, i);
        }
        for (long row = 0; row < rows; row += PART) {
            int count = rows - row < PART ? rows - row : PART;
#ifdef IN_TILES
            multiply_tiles(count, of->count, x + row * m->in + i, m->in, values, of->count * PAIR * LANES, in, made, WIDTH, 1, 0);
#else
            multiply_rows(count, of->count, of->count, PAIR * LANES, x + row * m->in + i, m->in, values, in, made, WIDTH, 1, (Ahead){});
#endif
            for (int r = 0; r < count; r++)
                for (int p = 0; p < of->count; p++) {
                    Total *total = (Total *)(sums + (row + r) * WIDTH + p * LANES);
                    *total = add_span(i ? *total : (Total){}, *(accumulator *)(made + r * WIDTH + p * LANES), m, &sides[p],
                                      x_sums ? x_sums[(row + r) * spans + s] : 0);
                }
        }
    }
}
#else
// Rows of x from input i on times `in` decoded inputs of a panel, [in][LANES], added to their sums; whole spans, and the s-th first.
static inline __attribute__((always_inline)) void multiply_values(const int rows, const Matrix *m, long n, const T *x, const T *values,
                                                                  long i, long in, const float *x_sums, long s, float *sums) {
    const long spans = spans_of(m), stop = i + in;
    for (; i < stop; s++) {
        Side side = side_of(m, n, i);
        accumulator sum[ROWS] = {};
        for (long end = span_end(m, i); i < end; i += PAIR, values += PAIR * LANES)
            for (int turn = 0; turn < TURNS; turn++) {
                long at = i;
                if (turn) __asm__("" : "+r"(at));  // as in `multiply_tile`
                operand w = operand_of(load_factors(values), turn);
#ifdef __x86_64__
                for (int q = 0; q < PARTS; q++) __asm__("" : "+x"(w.of[q]));  // gcc would load them again for every row
#endif
                for (int r = 0; r < rows; r++) sum[r] = multiply_add(sum[r], load_broadcast(x + r * m->in + at, turn), w);
            }
        for (int r = 0; r < rows; r++) {
            Total *total = (Total *)(sums + r * WIDTH);
            *total = add_span(*total, sum[r], m, &side, x_sums ? x_sums[r * spans + s] : 0);
        }
    }
}

// The same for any number of rows up to ROWS.
static __attribute__((noinline)) void multiply_values_of(int rows, const Matrix *m, long n, const T *x, const T *values, long i, long in,
                                                         const float *x_sums, long s, float *sums) {
#define OF_ROWS(count) \
    case count: multiply_values(count, m, n, x, values, i, in, x_sums, s, sums); break;
    switch (rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}

// Up to CHUNK rows of x times some panels. As many spans as fit the first-level cache are decoded once for all rows.
static void multiply_decoded(const Matrix *m, const Panels *of, const T *x, long rows, const float *x_sums, float *sums) {
    T values[SPAN * LANES] __attribute__((aligned(64)));
    const long spans = spans_of(m), parts = (rows + ROWS - 1) / ROWS;
    for (long r = 0; r < rows; r++) memset(sums + r * WIDTH, 0, of->count * LANES * sizeof(float));
    for (int p = 0; p < of->count; p++)
        for (long i = 0, s = 0, in, count; i < m->in; i += in, s += count) {
            in = span_end(m, i) - i, count = 1;
            for (long end; i + in < m->in && (end = span_end(m, i + in)) <= i + SPAN; count++) in = end - i;
            decode_span(m, of, of->first + p, i, in, values, LANES);
            for (long part = 0; part < parts; part++) {  // of nearly the same number of rows
                long row = rows * part / parts, row_end = rows * (part + 1) / parts;
                multiply_values_of(row_end - row, m, of->first + p, x + row * m->in, values, i, in,
                                   x_sums ? x_sums + row * spans : NULL, s, sums + row * WIDTH + p * LANES);
            }
        }
}
#endif
