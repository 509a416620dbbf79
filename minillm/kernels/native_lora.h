// The products of LoRA adapters, each token with its own: out += B (A x). Built in chapter 23.
//
// A [rank, in] makes `rank` numbers of a token, which stay float32; B makes `out` numbers of those. Tokens of one adapter that
// stand side by side, as those of a prompt do, share the reading of its matrices: RUN of them, with STRIP ranks or panels at once.
//
//     shrink   LANES inputs at a time:     sum[token][rank] += x[token][i : i + LANES] * A[rank][i : i + LANES]
//     expand   LANES outputs at a time:    sum[token][o : o + LANES] += shrunk[token][rank] * B[o : o + LANES][rank]
//
// A sum takes its inputs, and its ranks, in the same order whatever the tile: a token's result never depends on its company.

#ifdef __AVX512F__
enum { RUN = 4, STRIP = 4 };  // 16 sums of the 32 registers
typedef lanes floats;
static inline floats load_floats(const T *p) { return load_lanes(p); }
static inline floats add_product(floats sum, floats x, floats w) { return fused(x, w, sum); }
static inline lanes lanes_of(floats x) { return x; }
static inline floats floats_of(lanes x) { return x; }
#else
enum { RUN = 1, STRIP = 4 };
typedef accumulator floats;  // in vectors of the CPU's own width: see native_linear.h
static inline floats load_floats(const T *p) { return load_factors(p); }
static inline floats add_product(floats sum, floats x, floats w) {
    for (int q = 0; q < PARTS; q++) sum.of[q] += x.of[q] * w.of[q];
    return sum;
}
static inline lanes lanes_of(floats x) { return as_lanes(x); }
static inline floats floats_of(lanes x) { return as_factors(x); }
#endif

// The adapters of all batch slots; strides in numbers. See `native_lora.Adapters`.
typedef struct {
    const T *a, *b;  // [max_loras, rank, in] and [max_loras, out, rank]
    long a_slot, b_slot, b_out, b_rank;
    long in, out, rank;
} Adapters;

static inline float sum_halves(lanes x) {
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) part[l] += part[l + width];
    return part[0];
}

// The inputs behind the last whole LANES of them. Not inlined, so that the compiler decides once how it is rounded.
static __attribute__((noinline)) float multiply_rest(const T *x, const T *a, long count) {
    float sum = 0;
    for (long i = 0; i < count; i++) sum += load(x[i]) * load(a[i]);
    return sum;
}

static inline __attribute__((always_inline)) void shrink_tile(const int tokens, const int ranks, const Adapters *of, const T *x,
                                                              long x_stride, const T *a, float *shrunk) {
    floats sum[RUN][STRIP] = {};
    long whole = of->in / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        floats w[STRIP];
        for (int r = 0; r < ranks; r++) w[r] = load_floats(a + r * of->in + i);
        for (int t = 0; t < tokens; t++) {
            floats one = load_floats(x + t * x_stride + i);
            for (int r = 0; r < ranks; r++) sum[t][r] = add_product(sum[t][r], one, w[r]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < ranks; r++)
            shrunk[t * of->rank + r] = sum_halves(lanes_of(sum[t][r])) +
                                       multiply_rest(x + t * x_stride + whole, a + r * of->in + whole, of->in - whole);
}

// shrunk [tokens, rank] from `rank` on: of up to RUN tokens that have the same adapter.
static void shrink(const Adapters *of, const T *x, long x_stride, long slot, int tokens, long rank, long end, float *shrunk) {
    const T *a = of->a + slot * of->a_slot;
    for (; rank + STRIP <= end; rank += STRIP) {
        if (tokens == RUN) shrink_tile(RUN, STRIP, of, x, x_stride, a + rank * of->in, shrunk + rank);
        else
            for (int t = 0; t < tokens; t++)
                shrink_tile(1, STRIP, of, x + t * x_stride, 0, a + rank * of->in, shrunk + t * of->rank + rank);
    }
    for (; rank < end; rank++)
        for (int t = 0; t < tokens; t++)
            shrink_tile(1, 1, of, x + t * x_stride, 0, a + rank * of->in, shrunk + t * of->rank + rank);
}

// B of one rank for LANES outputs: side by side in memory, or gathered; zeros beyond the last output.
static inline floats load_outputs(const Adapters *of, const T *b, long width) {
    if (of->b_out == 1 && width >= LANES) return load_floats(b);
    T some[LANES] = {};
    for (long l = 0; l < width && l < LANES; l++) some[l] = b[l * of->b_out];
    return load_floats(some);
}

static inline __attribute__((always_inline)) void expand_tile(const int tokens, const int panels, const Adapters *of,
                                                              const float *shrunk, const T *b, long width, T *out,
                                                              long out_stride) {
    floats sum[RUN][STRIP] = {};
    for (long r = 0; r < of->rank; r++) {
        floats w[STRIP];
        for (int p = 0; p < panels; p++)
            w[p] = load_outputs(of, b + r * of->b_rank + p * LANES * of->b_out, width - p * LANES);
        for (int t = 0; t < tokens; t++) {
            floats one = floats_of(shrunk[t * of->rank + r] - (lanes){});
            for (int p = 0; p < panels; p++) sum[t][p] = add_product(sum[t][p], one, w[p]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int p = 0; p < panels; p++) {
            T *to = out + t * out_stride + p * LANES;
            long left = width - p * LANES;
            if (left >= LANES) finish_lanes(lanes_of(sum[t][p]), NULL, to, to);
            else finish_last((const float *)&sum[t][p], NULL, to, to, left);
        }
}

// out [tokens, out] from output `from` on, changed in place: of up to RUN tokens that have the same adapter.
static void expand(const Adapters *of, const float *shrunk, long slot, int tokens, long from, long end, T *out, long out_stride) {
    const T *b = of->b + slot * of->b_slot;
    for (; from + STRIP * LANES <= end; from += STRIP * LANES) {
        const T *panel = b + from * of->b_out;
        if (tokens == RUN) expand_tile(RUN, STRIP, of, shrunk, panel, STRIP * LANES, out + from, out_stride);
        else
            for (int t = 0; t < tokens; t++)
                expand_tile(1, STRIP, of, shrunk + t * of->rank, panel, STRIP * LANES, out + t * out_stride + from, 0);
    }
    for (; from < end; from += LANES)
        for (int t = 0; t < tokens; t++)
            expand_tile(1, 1, of, shrunk + t * of->rank, b + from * of->b_out, end - from, out + t * out_stride + from, 0);
}

static _Thread_local Workspace for_shrunk;

// Tokens from `first` that share an adapter, RUN at most.
static inline int run_of(const int32_t *slots, long first, long end) {
    int count = 1;
    while (count < RUN && first + count < end && slots[first + count] == slots[first]) count++;
    return count;
}

// out [tokens, out] += what each token's adapter makes of x [tokens, in]; slot -1 is no adapter. Returns 1 if memory ran out.
int add_lora(const Adapters *of, const T *x, long x_stride, const int32_t *slots, T *out, long out_stride, long tokens) {
    float *shrunk = reserve(&for_shrunk, tokens * of->rank * sizeof(float));
    if (!shrunk) return 1;
    int size = tokens * of->rank * (of->in + of->out) > 4 * PARALLEL_FROM ? team_size() : 1;
    // Threads share tokens where there are many, else the ranks and then the outputs of each.
    long parts = tokens >= 4 * size ? 1 : size, chunk = tokens >= 16 * size ? 16 : parts == 1 ? RUN : tokens;
    long chunks = (tokens + chunk - 1) / chunk;
#pragma omp parallel num_threads(size)
    {
#pragma omp for
        for (long item = 0; item < chunks * parts; item++) {
            long end = (item / parts + 1) * chunk < tokens ? (item / parts + 1) * chunk : tokens, part = item % parts, count;
            long rank = whole(of->rank * part / parts, STRIP), last = whole(of->rank * (part + 1) / parts, STRIP);
            for (long token = item / parts * chunk; token < end; token += count) {
                count = run_of(slots, token, end);
                if (slots[token] >= 0)
                    shrink(of, x + token * x_stride, x_stride, slots[token], count, rank, last < of->rank ? last : of->rank,
                           shrunk + token * of->rank);
            }
        }
#pragma omp for
        for (long item = 0; item < chunks * parts; item++) {
            long end = (item / parts + 1) * chunk < tokens ? (item / parts + 1) * chunk : tokens, part = item % parts, count;
            long from = whole(of->out * part / parts, LANES), last = whole(of->out * (part + 1) / parts, LANES);
            for (long token = item / parts * chunk; token < end; token += count) {
                count = run_of(slots, token, end);
                if (slots[token] >= 0)
                    expand(of, shrunk + token * of->rank, slots[token], count, from, last < of->out ? last : of->out,
                           out + token * out_stride, out_stride);
            }
        }
    }
    return 0;
}
