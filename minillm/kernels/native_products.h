// Any matrix times any number of rows: by all threads, or by the one that calls. Built in chapters 14 and 15.

// The sum of a token's numbers over each span, [spans].
static void sum_spans(const Matrix *m, const T *x, float *sums) {
    for (long s = 0, i = 0; s < spans_of(m); s++) {
        long end = span_end(m, i);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long j = i; j < end; j++) sum += load(x[j]);
        sums[s] = sum, i = end;
    }
}

// The rows of a product, and what a matrix wants of them beside: sums of spans where it has zeros, codes for W8A8.
typedef struct {
    const T *x;
    float *sums;     // [rows][spans]
    float *scales;   // [rows]
    uint8_t *codes;  // [rows][in]
    float *wide;     // [rows][in]: x as floats, where the CPU multiplies nothing else
} Rows;

static int take_rows(const Matrix *m, const T *x, long rows, Rows *taken) {  // returns 1 if memory ran out
    *taken = (Rows){x, NULL, NULL, NULL, NULL};
    if (m->kind == NUMBERS) {
        if (IS_WIDENED && rows >= 2 * ROWS) taken->wide = reserve(&for_rows, rows * m->in * sizeof(float));  // or not
    } else if (m->kind == W8A8) {
        if (!(taken->scales = reserve(&for_rows, rows * (sizeof(float) + m->in)))) return 1;
        taken->codes = (uint8_t *)(taken->scales + rows);
    } else if (m->zeros) {
        if (!(taken->sums = reserve(&for_rows, rows * spans_of(m) * sizeof(float)))) return 1;
    }
    return 0;
}

static void take_row(const Matrix *m, const Rows *taken, long row) {
    const T *x = taken->x + row * m->in;
    if (taken->codes) taken->scales[row] = quantize_row(x, taken->codes + row * m->in, m->in, m->activation_scale);
    if (taken->sums) sum_spans(m, x, taken->sums + row * spans_of(m));
    if (taken->wide) widen(x, m->in, taken->wide + row * m->in);
}

static inline int takes_rows(const Rows *taken) { return taken->codes || taken->sums || taken->wide; }

// Up to CHUNK rows from `row` times some panels, to their place. `all_rows`: how many the product has.
static void multiply_block(const Matrix *m, const Rows *taken, long row, long rows, long all_rows, const Panels *of,
                           const Target *target) {
    float sums[CHUNK * WIDTH] __attribute__((aligned(64)));
    const T *x = taken->x + row * m->in;
    const float *x_sums = taken->sums ? taken->sums + row * spans_of(m) : NULL;
    if (m->kind == NUMBERS) {
        multiply_numbers(x, taken->wide ? taken->wide + row * m->in : NULL, rows, of, m->codes, m->in, sums);
    } else if (m->kind == W8A8) {
        for (long r = 0; r < rows; r += ROWS)
            multiply_integer_rows(rows - r < ROWS ? rows - r : ROWS, of, m, taken->codes + (row + r) * m->in,
                                  taken->scales + row + r, sums + r * WIDTH);
#ifdef IN_TILES
    } else if (rows <= FEW_CODES) {
        multiply_few_codes(rows, m->kind, m, of, x, x_sums, sums);
#endif
    } else if (ALL_DECODED || (all_rows >= DECODE_FROM && m->group >= DECODED_GROUP)) {
        multiply_decoded(m, of, x, rows, x_sums, sums);
    } else {
        for (long r = 0; r < rows; r += ROWS) {
            int count = rows - r < ROWS ? rows - r : ROWS;
            const T *first = x + r * m->in;
            const float *first_sums = x_sums ? x_sums + r * spans_of(m) : NULL;
            switch (m->kind) {
                case NIBBLES: multiply_codes_of(count, NIBBLES, m, of, first, first_sums, sums + r * WIDTH); break;
                case BYTES: multiply_codes_of(count, BYTES, m, of, first, first_sums, sums + r * WIDTH); break;
#ifndef IN_PAIRS
                default: multiply_codes_of(count, FLOATS, m, of, first, first_sums, sums + r * WIDTH);
#endif
            }
        }
    }
    finish(sums, row, rows, of, target);
}

// The next panels from `first`, at most up to `end`: what is left of a group; where that is one panel, as many as few rows take.
static inline Panels next_panels(const Matrix *m, long rows, long first, long end) {
    long stop = GROUP > 1 ? (first / GROUP + 1) * GROUP : first + (rows <= 2 * ROWS ? PANELS : 1);
    return (Panels){first, m->out, (stop < end ? stop : end) - first};
}

// The panels of a thread, from `at` on those that have not been taken. In a cache line of its own.
typedef struct {
    long at, end;
    char apart[48];
} Share;

// Equal shares, in whole groups; where panels are few, threads share a group. Returns how many panels are taken at once: of a shared
// group all that a thread has, so that two threads never take parts of one.
static long share_panels(const Matrix *m, long rows, int threads, Share *shares) {
    long panels = (m->out + LANES - 1) / LANES, in_groups = panels >= 8 * GROUP * threads, unit = in_groups ? GROUP : 1;
    for (long t = 0; t < threads; t++)
        shares[t] = (Share){.at = panels / unit * t / threads * unit, .end = panels / unit * (t + 1) / threads * unit};
    shares[threads - 1].end = panels;
    return !in_groups ? panels : GROUP > 1 ? GROUP : rows <= 2 * ROWS ? PANELS : 1;
}

// x [rows, in] times any matrix, to its place. A thread that is done with its own share takes from another's. Returns 1 if memory ran
// out.
static int multiply_to(const Target *target, const Matrix *m, const T *x, long rows) {
    SPAN(PRODUCTS);
    Rows taken;
    if (take_rows(m, x, rows, &taken)) return 1;
    long begun = now(), done = begun;
    int size = rows * m->in * m->out > 65536 ? team_size() : 1;
    Share shares[size] __attribute__((aligned(64)));
    const long step = share_panels(m, rows, size, shares);
#pragma omp parallel num_threads(size)
    {
        if (takes_rows(&taken)) {
#pragma omp for
            for (long row = 0; row < rows; row++) take_row(m, &taken, row);
        }
        int thread = omp_get_thread_num();
        begin_tiles(1);
        for (int k = 0; k < size; k++) {
            Share *share = &shares[(thread + k) % size];
            for (long at; (at = __atomic_fetch_add(&share->at, step, __ATOMIC_RELAXED)) < share->end;) {
                long end = at + step < share->end ? at + step : share->end;
                for (Panels of = next_panels(m, rows, at, end); of.first < end; of = next_panels(m, rows, of.first + of.count, end))
                    for (long row = 0; row < rows; row += CHUNK)
                        multiply_block(m, &taken, row, rows - row < CHUNK ? rows - row : CHUNK, rows, &of, target);
            }
        }
        end_tiles();
        if (thread == 0) done = now();
    }
    if (size > 1) note_wait(done - begun, now() - done);
    return 0;
}

// out [rows, out] = x [rows, in] times any matrix, plus bias and plus residual [rows, out] if there are. Returns 1 if memory ran out.
int multiply(const Matrix *m, const T *x, const T *bias, const T *residual, T *out, long rows) {
    Target target = {bias, residual, out, m->out};
    return multiply_to(&target, m, x, rows);
}

// The same for up to CHUNK rows, by the thread that calls it.
static int multiply_chunk(const Matrix *m, const T *x, const T *bias, const T *residual, T *out, long rows) {
    Target target = {bias, residual, out, m->out};
    Rows taken;
    if (take_rows(m, x, rows, &taken)) return 1;
    for (long row = 0; row < rows && takes_rows(&taken); row++) take_row(m, &taken, row);
    long panels = (m->out + LANES - 1) / LANES;
    begin_tiles(1);
    for (Panels of = next_panels(m, rows, 0, panels); of.first < panels; of = next_panels(m, rows, of.first + of.count, panels))
        multiply_block(m, &taken, 0, rows, rows, &of, &target);
    end_tiles();
    return 0;
}

// The same of weights as `native.pack` packs them.
void linear(const T *x, const T *panels, const T *bias, T *out, long rows, long out_features, long in) {
    Matrix m = {.codes = panels, .kind = NUMBERS, .in = in, .out = out_features, .group = in};
    multiply(&m, x, bias, NULL, out, rows);
}

// out [count, in] = rows of the weight, by their numbers: an embedding that is the output matrix too. Returns 1 if memory
// ran out.
int unpack_rows(const Matrix *m, const int64_t *ids, T *out, long count) {
    long groups = (m->in + m->group - 1) / m->group;
    T *values = reserve(&for_rows, m->in * LANES * sizeof(T));
    if (!values) return 1;
    for (long k = 0; k < count; k++) {
        long n = ids[k] / LANES, lane = ids[k] % LANES;
        Panels of = {n, m->out, 1};
        const uint8_t *codes = codes_of_panel(m, n);
        if (m->kind != W8A8) decode_span(m, &of, n, 0, m->in, values, LANES);
        for (long i = 0; i < m->in; i++) {
            long place = (n * groups + i / m->group) * LANES;
            const int8_t *step = (const int8_t *)codes + i / STEP * panels_beside(&of) * step_bytes(W8A8);
            float value = m->kind == W8A8 ? step[(i / 4 % 2 * LANES + lane) * 4 + i % 4]
                                          : load(values[(i / PAIR * LANES + lane) * PAIR + i % PAIR]);
            if (m->zeros) value -= m->zeros[place + lane];
            out[k * m->in + i] = store(value * load_scales(m, place)[lane]);
        }
    }
    return 0;
}
