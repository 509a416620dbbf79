// The products of LoRA adapters, each token with its own: out += B (A x). Built in chapter 23.
//
// A [rank, in] makes `rank` numbers of a token, which stay float32; B makes `out` numbers of those. Tokens of one adapter share the
// reading of its matrices, wherever they stand in the batch: RUN of them, with STRIP ranks or panels at once.
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
static inline floats load_floats(const T *p) { return load_operand(p); }
static inline floats add_product(floats sum, floats x, floats w) {
    for (int q = 0; q < PARTS; q++) sum.of[q] += x.of[q] * w.of[q];
    return sum;
}
static inline lanes lanes_of(floats x) { return as_lanes(x); }
static inline floats floats_of(lanes x) { return as_operand(x); }
#endif

// The adapters of all batch slots, for one part of a matrix's outputs; strides in numbers. See `native_structs.Adapters`.
typedef struct {
    const T *a, *b;  // [max_loras, rank, in] and [max_loras, out, rank]
    long a_slot, b_slot, b_out, b_rank;
    long in, out, rank;  // rank 0: no adapter changes this part
    long first;          // where the part begins among the outputs of the matrix
} Adapters;

// The parts of a matrix: q, k and v of one that makes all three.
typedef struct {
    const Adapters *parts;
    long count;
} AdaptedMatrix;

// Of a whole layer; see `native_structs.LayerAdapters`.
typedef struct {
    AdaptedMatrix qkv, o, gate_up, down;
} LayerAdapters;

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

// Tokens that share an adapter: which rows of x and of the output they are.
typedef struct {
    long slot, count, from;  // `from`: the place of the first in `order`
} Run;

// The tokens that have an adapter, sorted by it; in the order of the batch where it is the same.
typedef struct {
    const long *order;
    const Run *runs;
    long tokens, count;  // of runs
} Groups;

static _Thread_local Workspace for_groups, for_shrunk;

// slots [tokens], -1 for no adapter. Returns 1 if memory ran out.
static int group_tokens(const int32_t *slots, long tokens, Groups *groups) {
    long most = 0;
    for (long i = 0; i < tokens; i++) most = slots[i] + 1 > most ? slots[i] + 1 : most;
    // A run is full, or the last of its adapter.
    long *starts = reserve(&for_groups, (most + 1 + tokens) * sizeof(long) + (tokens / RUN + most) * sizeof(Run));
    if (!starts) return 1;
    long *order = starts + most + 1, count = 0;
    Run *runs = (Run *)(order + tokens);
    memset(starts, 0, (most + 1) * sizeof(long));
    for (long i = 0; i < tokens; i++)
        if (slots[i] >= 0) starts[slots[i] + 1]++;
    for (long s = 0; s < most; s++) {
        long from = starts[s], end = from + starts[s + 1];
        starts[s + 1] = end;
        for (; from < end; from += RUN) runs[count++] = (Run){s, end - from < RUN ? end - from : RUN, from};
    }
    long with = starts[most];
    for (long i = 0; i < tokens; i++)
        if (slots[i] >= 0) order[starts[slots[i]]++] = i;
    *groups = (Groups){order, runs, with, count};
    return 0;
}

static inline __attribute__((always_inline)) void shrink_tile(const int tokens, const int ranks, const Adapters *of,
                                                              const T *const *x, const T *a, float *shrunk) {
    floats sum[RUN][STRIP] = {};
    long whole = of->in / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        floats w[STRIP];
        for (int r = 0; r < ranks; r++) {
            prefetch(a + (r + ranks) * of->in + i);  // of the next ranks, or of B: they may come from memory
            w[r] = load_floats(a + r * of->in + i);
        }
        for (int t = 0; t < tokens; t++) {
            floats one = load_floats(x[t] + i);
            for (int r = 0; r < ranks; r++) sum[t][r] = add_product(sum[t][r], one, w[r]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < ranks; r++)
            shrunk[t * of->rank + r] = sum_halves(lanes_of(sum[t][r])) +
                                       multiply_rest(x[t] + whole, a + r * of->in + whole, of->in - whole);
}

// shrunk [tokens, rank] from `rank` on: of up to RUN tokens that have the same adapter.
static void shrink(const Adapters *of, const T *const *x, long slot, int tokens, long rank, long end, float *shrunk) {
    const T *a = of->a + slot * of->a_slot;
    for (; rank + STRIP <= end; rank += STRIP) {
        const T *rows = a + rank * of->in;
        int t = 0;
        if (tokens == RUN) shrink_tile(RUN, STRIP, of, x, rows, shrunk + rank), t = RUN;
        for (; RUN > 2 && t + 2 <= tokens; t += 2) shrink_tile(2, STRIP, of, x + t, rows, shrunk + t * of->rank + rank);
        for (; t < tokens; t++) shrink_tile(1, STRIP, of, x + t, rows, shrunk + t * of->rank + rank);
    }
    for (; rank < end; rank++)
        for (int t = 0; t < tokens; t++)
            shrink_tile(1, 1, of, x + t, a + rank * of->in, shrunk + t * of->rank + rank);
}

// B of one rank for LANES outputs: side by side in memory, or gathered; zeros beyond the last output.
static inline floats load_outputs(const Adapters *of, const T *b, long width) {
    if (of->b_out == 1 && width >= LANES) return load_floats(b);
    T some[LANES] = {};
    for (long l = 0; l < width && l < LANES; l++) some[l] = b[l * of->b_out];
    return load_floats(some);
}

static inline __attribute__((always_inline)) void expand_tile(const int tokens, const int panels, const Adapters *of,
                                                              const float *shrunk, const T *b, long width, T *const *out,
                                                              long from) {
    floats sum[RUN][STRIP] = {};
    for (long r = 0; r < of->rank; r++) {
        floats w[STRIP];
        for (int p = 0; p < panels; p++) {
            const T *place = b + r * of->b_rank + p * LANES * of->b_out;
            prefetch(place + panels * LANES * of->b_out);
            w[p] = load_outputs(of, place, width - p * LANES);
        }
        for (int t = 0; t < tokens; t++) {
            floats one = floats_of(shrunk[t * of->rank + r] - (lanes){});
            for (int p = 0; p < panels; p++) sum[t][p] = add_product(sum[t][p], one, w[p]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int p = 0; p < panels; p++) {
            T *to = out[t] + from + p * LANES;
            long left = width - p * LANES;
            if (left >= LANES) finish_lanes((const float *)&sum[t][p], NULL, to, to);
            else finish_last((const float *)&sum[t][p], NULL, to, to, left);
        }
}

// Rows of the output from column `from` on, changed in place: of up to RUN tokens that have the same adapter.
static void expand(const Adapters *of, const float *shrunk, long slot, int tokens, long from, long end, T *const *out) {
    const T *b = of->b + slot * of->b_slot;
    for (; from + STRIP * LANES <= end; from += STRIP * LANES) {
        const T *panel = b + from * of->b_out;
        int t = 0;
        if (tokens == RUN) expand_tile(RUN, STRIP, of, shrunk, panel, STRIP * LANES, out, from), t = RUN;
        for (; RUN > 2 && t + 2 <= tokens; t += 2)
            expand_tile(2, STRIP, of, shrunk + t * of->rank, panel, STRIP * LANES, out + t, from);
        for (; t < tokens; t++) expand_tile(1, STRIP, of, shrunk + t * of->rank, panel, STRIP * LANES, out + t, from);
    }
    for (; from < end; from += LANES)
        for (int t = 0; t < tokens; t++)
            expand_tile(1, 1, of, shrunk + t * of->rank, b + from * of->b_out, end - from, out + t, from);
}

// The rows of a step that one matrix is applied to; strides in numbers.
typedef struct {
    const AdaptedMatrix *of;
    const Groups *groups;
    const T *x;
    T *out;
    long x_stride, out_stride;
    float *shrunk;  // [parts][tokens][the highest rank]
    long rank;      // of all parts, the highest
} Additions;

// Piece `piece` of `pieces` of the ranks of one part, for one run.
static void shrink_run(const Additions *add, long part, const Run *run, long piece, long pieces) {
    const Adapters *of = add->of->parts + part;
    const T *x[RUN];
    for (long t = 0; t < run->count; t++) x[t] = add->x + add->groups->order[run->from + t] * add->x_stride;
    long from = whole(of->rank * piece / pieces, STRIP), end = whole(of->rank * (piece + 1) / pieces, STRIP);
    shrink(of, x, run->slot, run->count, from, end < of->rank ? end : of->rank,
           add->shrunk + part * add->groups->tokens * add->rank + run->from * of->rank);
}

// The same of its outputs.
static void expand_run(const Additions *add, long part, const Run *run, long piece, long pieces) {
    const Adapters *of = add->of->parts + part;
    T *out[RUN];
    for (long t = 0; t < run->count; t++) out[t] = add->out + add->groups->order[run->from + t] * add->out_stride + of->first;
    long from = whole(of->out * piece / pieces, LANES), end = whole(of->out * (piece + 1) / pieces, LANES);
    expand(of, add->shrunk + part * add->groups->tokens * add->rank + run->from * of->rank, run->slot, run->count, from,
           end < of->out ? end : of->out, out);
}

// Whether an adapter changes the matrix. Returns the highest rank.
static inline long adapted_rank(const AdaptedMatrix *of) {
    long rank = 0;
    for (long p = 0; p < of->count; p++) rank = of->parts[p].rank > rank ? of->parts[p].rank : rank;
    return rank;
}

// out [tokens, ...] += what each token's adapter makes of x [tokens, in]. `alone`: by the thread that calls. Returns 1 if memory
// ran out.
static int add_adapters(const AdaptedMatrix *of, const Groups *groups, const T *x, long x_stride, T *out, long out_stride,
                        int alone) {
    long rank = adapted_rank(of), runs = groups->count, work = 0;
    if (!rank || !runs) return 0;
    for (long p = 0; p < of->count; p++) work += groups->tokens * of->parts[p].rank * (of->parts[p].in + of->parts[p].out);
    float *shrunk = reserve(&for_shrunk, of->count * groups->tokens * rank * sizeof(float));
    if (!shrunk) return 1;
    Additions add = {of, groups, x, out, x_stride, out_stride, shrunk, rank};
    int size = alone || work <= PARALLEL_FROM ? 1 : team_size();
    // Threads share the runs where there are many; each of them then has all parts of a run, which differ in size. Where there
    // are few, threads share the ranks, and then the outputs.
    long parts = of->count, pieces = runs % size == 0 || runs >= 4 * size ? 1 : size, items = runs * parts * pieces;
#pragma omp parallel num_threads(size) if (size > 1)
    {
        if (pieces == 1) {
#pragma omp for
            for (long item = 0; item < items; item++) {
                shrink_run(&add, item % parts, groups->runs + item / parts, 0, 1);
                expand_run(&add, item % parts, groups->runs + item / parts, 0, 1);
            }
        } else {
#pragma omp for
            for (long item = 0; item < items; item++)
                shrink_run(&add, item / pieces % parts, groups->runs + item / pieces / parts, item % pieces, pieces);
#pragma omp for
            for (long item = 0; item < items; item++)
                expand_run(&add, item / pieces % parts, groups->runs + item / pieces / parts, item % pieces, pieces);
        }
    }
    return 0;
}

// out [tokens, out] += what each token's adapter makes of x [tokens, in]; slot -1 is no adapter. Returns 1 if memory ran out.
int add_lora(const Adapters *of, const T *x, long x_stride, const int32_t *slots, T *out, long out_stride, long tokens) {
    AdaptedMatrix only = {of, 1};
    Groups groups;
    return group_tokens(slots, tokens, &groups) || add_adapters(&only, &groups, x, x_stride, out, out_stride, 0);
}
