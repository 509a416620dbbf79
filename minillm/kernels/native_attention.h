// Attention over pages, in place: every query of a tile looks at its past. Built in chapter 14.
//
// A tile of queries goes through its keys a block after the other, with an online softmax (FlashAttention, chapter 12), so that
// scores and weights stay in the second-level cache. Of each block, WIDTH keys at a time, taken from their pages, are the panels
// that all queries are multiplied with; then KEYS values at a time are the panels that the weights of the keys are multiplied with.
// Both products are those of native_linear.h. A block begins at the same keys for every row, so that its bits do not depend on its
// company. With a window or sinks all keys are one block, since tiles begin to read at any page. Where the CPU has a matrix unit,
// pages without window and sinks are read by native_amx_attention.h.

// Scores of the sinks, which meet queries that are turned: [rows][dim] floats.
static void score_sinks(int rows, const float *turned, const Past *past, float *scores, long stride) {
    const long dim = past->pages->dim, size = past->pages->size;
    for (int r = 0; r < rows; r++)
        for (long key = past->first; key < past->pages->sinks && key < past->last; key++) {
            const C *one = key_block(past, key / size) + key % size;
            float sum = 0;
            for (long d = 0; d < dim; d++) sum += turned[r * dim + d] * key_one(one, d, size);
            scores[r * stride + key - past->start] = sum;
        }
}

// Multiply with what codes are scaled by: the scores of the keys from `start` to stop - 1 that a row sees, or the weights of their
// values.
static void scale_keys(int rows, const Past *past, long start, long stop, const float *scales, float *scores, long stride) {
    const long size = past->pages->size;
    for (long key = start < past->first ? past->first : start; key < stop; key++) {
        if (!is_seen(past, key)) continue;
        float scale = scales[vectors_of(past, key / size) + key % size];
        for (int r = 0; r < rows; r++) scores[r * stride + key - start] *= scale;
    }
}

static inline ints first_lanes(long count) {  // -1 in the first `count` lanes, 0 behind
    const ints place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return place < (int)count;
}

// -1 in the first `count` numbers of a part, 0 behind.
static inline int_part first_of_part(long count) {
    static const int32_t place[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const int_part *)place < (int)count;
}

static inline float most_of(const float *s, long count, float most) {
    if (!count) return most;
    part found[AT_A_STEP];
    for (int q = 0; q < AT_A_STEP; q++) found[q] = most - (part){};
    long i = 0;
    for (; i + AT_A_STEP * WIDE <= count; i += AT_A_STEP * WIDE)
        for (int q = 0; q < AT_A_STEP; q++) found[q] = larger_part(found[q], *(const part *)(s + i + q * WIDE));
    for (; i + WIDE <= count; i += WIDE) found[0] = larger_part(found[0], *(const part *)(s + i));
    if (i < count) found[0] = larger_part(found[0], either_part(first_of_part(count - i), *(const part *)(s + i), found[0]));
    for (int q = 1; q < AT_A_STEP; q++) found[0] = larger_part(found[0], found[q]);
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)found[0]);
#endif
    for (int l = 0; l < WIDE; l++) most = found[0][l] > most ? found[0][l] : most;
    return most;
}

// s = exp(scale * (s - most)); returns the sum.
static inline float exp_of(float *s, long count, float scale, float most) {
    if (!count) return 0;
    union { lanes all; part of[PARTS]; } sum = {};
    long i = 0;
    for (; i + AT_A_STEP * WIDE <= count; i += AT_A_STEP * WIDE) {
        part made[AT_A_STEP];
        for (int q = 0; q < AT_A_STEP; q++) made[q] = (*(part *)(s + i + q * WIDE) - most) * scale;
        exp_parts(made, AT_A_STEP);
        for (int q = 0; q < AT_A_STEP; q++) sum.of[q % PARTS] += *(part *)(s + i + q * WIDE) = made[q];
    }
    for (int q = 0; i < count; i += WIDE, q = (q + 1) % PARTS) {
        part *here = (part *)(s + i), made = exp_part((*here - most) * scale);
        int_part seen = first_of_part(count - i);
        *here = either_part(seen, made, *here);
        sum.of[q] += either_part(seen, made, (part){});
    }
    return sum_lanes(sum.all);
}

typedef struct { float most, sum; } Softmax;  // of a row, over the keys so far: the largest score, and the sum of the weights

// A key without a value: a learned sink logit of the head; -INFINITY for none.
static inline Softmax begin_softmax(float learned) { return (Softmax){learned, learned > -INFINITY}; }

// Weights where every score is -INFINITY: 0, but a score that is no number stays none. Returns their sum.
static float weights_of_nothing(float *s, long count) {
    float sum = 0;
    for (long i = 0; i < count; i++) sum += s[i] = s[i] == s[i] ? 0 : s[i];
    return sum;
}

// The scores of a block to weights, exp(scale * (score - most)), with 0 for what the row does not see. Counted from the block's first
// key, it sees the keys from 0 to sinks - 1 and from `from` to `to` - 1; none of them where `to` is 0 or less. Returns what the sums of
// the blocks before are to be multiplied with.
static float softmax_row(Softmax *so_far, float *s, long sinks, long from, long to, long end, float scale) {
    if (to <= 0) {
        memset(s, 0, end * sizeof(float));
        return 1;
    }
    memset(s + sinks, 0, (from - sinks) * sizeof(float));
    memset(s + to, 0, (end - to) * sizeof(float));
    const float most = most_of(s + from, to - from, most_of(s, sinks, so_far->most));
    if (most == -INFINITY) {
        so_far->sum += weights_of_nothing(s, to);
        return 1;
    }
    const float lower = (so_far->most - most) * scale, shrinks = lower < -87.0f ? 0 : fast_exp(lower);  // as `exp_part`
    const float added = exp_of(s, sinks, scale, most) + exp_of(s + from, to - from, scale, most);
    *so_far = (Softmax){most, so_far->sum * shrinks + added};
    return shrinks;
}

// The weights of `count` keys in T, [rows][KEYS]; of float32 they stand there already.
static inline const T *weights_of(const float *scores, long stride, int rows, long count, T *room, long *apart) {
#ifdef BF16
    for (int r = 0; r < rows; r++)
        for (long k = 0; k < count; k += LANES) store_lanes(room + r * KEYS + k, *(const lanes *)(scores + r * stride + k));
    *apart = KEYS;
    return room;
#else
    (void)rows, (void)count, (void)room;
    *apart = stride;
    return scores;
#endif
}

typedef struct {  // memory of a thread for one tile
    T *queries;                             // [TILE][dim, in whole pairs]
    float *turned;                          // [TILE][dim]
    float *scores;                          // [TILE][stride]; in the unit [TOGETHER][BLOCK]
    float *sums;                            // [TILE][dim, in whole panels]
    T *vectors;                             // the panels of WIDTH keys, or of KEYS values; in the unit of BLOCK keys
    T *values;                              // in the unit: the panels of BLOCK values
    T *weights;                             // [ROWS][KEYS], of few queries [TILE][stride]; in the unit [TOGETHER][BLOCK]
    float *widened;                         // in the unit: [ROWS][dim + BLOCK]
    long stride, dim_pairs, dim_panels;
} TileMemory;

static inline long whole(long count, long unit) { return (count + unit - 1) / unit * unit; }

static size_t place_tile(TileMemory *memory, char *at, long dim, long keys, long rows, int unit) {  // returns the bytes it takes
    TileMemory m = {.stride = whole(keys + 2 * WIDTH, KEYS), .dim_pairs = whole(dim, PAIR), .dim_panels = whole(dim, LANES)};
    size_t used = 0;
#define PLACE(name, count) (m.name = (void *)(at + used), used += whole((count) * sizeof(*m.name), 64))
    PLACE(queries, rows * m.dim_pairs);
    PLACE(turned, unit ? 0 : rows * dim);
    PLACE(scores, unit ? TOGETHER * BLOCK : rows * m.stride);
    PLACE(sums, rows * m.dim_panels);
    PLACE(vectors, unit ? BLOCK * dim : WIDTH * m.dim_pairs > KEYS * WIDTH ? WIDTH * m.dim_pairs : KEYS * WIDTH);
    PLACE(values, unit ? BLOCK * dim : 0);
    PLACE(weights, unit ? TOGETHER * BLOCK : sizeof(T) < sizeof(float) ? rows * m.stride : 0);  // of float32 they are the scores
    PLACE(widened, unit ? ROWS * (dim + BLOCK) : 0);
#undef PLACE
    *memory = m;
    return used;
}

// out = sums * inverse. Returns whether all of it is finite.
static int store_means(int rows, const TileMemory *m, long dim, const float *inverse, T **out) {
    part lost = {};  // 0, or no number
    for (int r = 0; r < rows; r++)
        for (long d = 0; d < dim; d += WIDE) {
            // + 0: where products take subnormal sums for 0, the sign of a zero depends on how many unseen values follow.
            part mean = *(const part *)(m->sums + r * m->dim_panels + d) * inverse[r] + 0.0f;
            if (d + WIDE <= dim) {
                lost += mean * 0.0f;
                store_part(out[r] + d, mean);
            } else for (int l = 0; d + l < dim; l++) lost[l] += mean[l] * 0.0f, out[r][d + l] = store(mean[l]);
        }
    float sum = 0;
    for (int l = 0; l < WIDE; l++) sum += lost[l];
    return sum == 0;
}

#include "native_amx_attention.h"

// The scores of a block of keys, from `start` to stop - 1, to weights, with zeros up to end - 1. Not inlined, so that few queries and
// many are rounded alike.
static __attribute__((noinline)) void weigh_keys(int rows, const Past *past, const TileMemory *m, const long *from, const long *to,
                                                 Softmax *so_far, int turns, float scale, long start, long stop, long end) {
    const Pages *p = past->pages;
    if (turns) score_sinks(rows, m->turned, past, m->scores, m->stride);
    if (SCALED) scale_keys(rows, past, start, stop, p->key_scales, m->scores, m->stride);
    for (int r = 0; r < rows; r++) {
        long sees = to[r] < stop ? to[r] : stop, sinks = p->sinks < sees ? p->sinks : sees, begin = from[r] > sinks ? from[r] : sinks;
        if (!p->sinks) sinks = start;
        if (begin < start) begin = start;
        const float shrinks = softmax_row(&so_far[r], m->scores + r * m->stride, sinks - start, begin - start, sees - start, end - start,
                                          scale);
        float *sums = m->sums + r * m->dim_panels;
        for (long d = 0; d < m->dim_panels && start > past->start && shrinks != 1; d += WIDE) *(part *)(sums + d) *= shrinks;
    }
    if (SCALED) scale_keys(rows, past, start, stop, p->value_scales, m->scores, m->stride);
}

// How many of `left` panels are multiplied at once: two and two rather than three and one, which leaves most registers empty.
static inline long next_width(long left) { return left <= PANELS ? left : left == PANELS + 1 && PANELS == 3 ? 2 : PANELS; }

// Where the block of keys that begins at `start` ends.
static inline long block_end(const Past *past, long start) {
    const long keys = keys_of_block(past->pages);
    return keys && past->last - start > keys ? start + keys : past->last;
}

// Attention of up to TILE queries of one sequence that read the same KV head, in order of position. Row r sees the keys from[r]
// to to[r] - 1, and the sinks; learned[r] is its sink logit. Returns whether all of `out` is finite.
static int attend_tile(int rows, const Past *past, const TileMemory *m, const long *from, const long *to, const float *learned,
                       int turns, float scale, T **out, Coming *coming) {
    const Pages *p = past->pages;
    const long dim = p->dim;
    Softmax so_far[TILE];
    for (int r = 0; r < rows; r++) so_far[r] = begin_softmax(learned[r]);
    for (long start = past->start, stop; start < past->last; start = stop) {
        stop = block_end(past, start);
        const long before = 2 * (start - past->start);  // keys and values that were read
        const long end = start + whole(stop - start, LANES);
        for (long key = start; key < stop; key += WIDTH) {
            long panels = (stop - key + LANES - 1) / LANES;
            if (panels > PANELS) panels = PANELS;
            const long read = (before + key - start + WIDTH) / p->size, until = until_read(coming, read + WIDTH / p->size);
            read_ahead(coming, read);
            take_keys(past, key, panels, m->vectors);
            for (int r = 0; r < rows; r += ROWS) {
                while (r + ROWS < rows && to[r + ROWS - 1] <= key) r += ROWS;  // none of these sees them
                const int some = rows - r < ROWS ? rows - r : ROWS;
                multiply_near(some, panels, m->queries + r * m->dim_pairs, m->dim_pairs, m->vectors,
                              m->dim_pairs, m->scores + r * m->stride + key - start, m->stride, 1,
                              read_on_the_way(coming, until, some, panels, m->dim_pairs / PAIR));
            }
        }
        weigh_keys(rows, past, m, from, to, so_far, turns, scale, start, stop, end);
        for (long key = start; key < stop; key += KEYS) {
            long count = whole(stop - key < KEYS ? stop - key : KEYS, PAIR);
            const C *at[KEYS + 1];
            find_values(past, key, count, at);
            const long read = (before + stop - start + key - start + KEYS) / p->size;
            const long until = until_read(coming, read + KEYS / p->size);
            read_ahead(coming, read);
            for (long d = 0, panels; d < dim; d += panels * LANES) {
                panels = next_width((dim - d + LANES - 1) / LANES);
                take_values(at, count, d, panels, dim, m->vectors);
                for (int r = 0; r < rows; r += ROWS) {
                    int some = rows - r < ROWS ? rows - r : ROWS;
                    if (to[r + some - 1] <= key) continue;  // their weights are 0
                    long apart;
                    const T *weights = weights_of(m->scores + r * m->stride + key - start, m->stride, some, count, m->weights, &apart);
                    float *sums = m->sums + r * m->dim_panels + d;
                    long seen = to[r + some - 1] - key < count ? whole(to[r + some - 1] - key, PAIR) : count;  // of these rows
                    multiply_near(some, panels, weights, apart, m->vectors, seen, sums, m->dim_panels, key == past->start,
                                  read_on_the_way(coming, until, some, panels, seen / PAIR));
                }
            }
        }
    }
    float inverse[TILE];
    for (int r = 0; r < rows; r++) inverse[r] = 1.0f / so_far[r].sum;
    return store_means(rows, m, dim, inverse, out);
}

enum { AT_A_TIME = 16 };  // blocks whose values are added at once

static inline int read_in_place(const Pages *p) { return p->size % LANES == 0 && p->dim % LANES == 0; }

static inline int all_seen(const Past *past, long key, long count) {
    return key + count <= past->last && (key >= past->from || key + count <= past->sinks);
}

// The same of few queries, which read keys and values where they lie: `rows` of each of the KV heads that are read.
static int attend_few(int rows, const Past *past, const TileMemory *m, const long *from, const long *to, const float *learned,
                      int turns, float scale, T **out, Coming *coming) {
    const Pages *p = past->pages;
    const long dim = p->dim, size = p->size, heads = past->heads;
    const long each = size * dim / IN_BYTE;  // from one head's part of a block to the next
    const C *at[AT_A_TIME], *ahead[AT_A_TIME] = {}, *of_head[2][AT_A_TIME];
    Softmax so_far[TILE];
    for (int r = 0; r < heads * rows; r++) so_far[r] = begin_softmax(learned[r]);
    read_ahead(coming, 0);
    for (long start = past->start, stop; start < past->last; start = stop) {
        stop = block_end(past, start);
        const long end = start + whole(stop - start, LANES);
        long block = start / size, offset = start % size;
        const C *before = NULL;  // what was prefetched last
        for (long key = start, panels; key < stop; key += panels * LANES) {
            panels = (stop - key + LANES - 1) / LANES < IN_PART ? (stop - key + LANES - 1) / LANES : IN_PART;
            for (int n = 0; n < panels; n++) {
                at[n] = key_block(past, block) + offset;
                if (offset) ahead[n] = before ? before + dim * LANES / IN_BYTE : at[n];
                else if (!(ahead[n] = next_coming(coming))) ahead[n] = at[n];
                before = ahead[n];
                if ((offset += LANES) == size) block++, offset = 0;
            }
            for (long h = 0; h < heads; h++) {
                for (int n = 0; n < panels; n++) of_head[0][n] = at[n] + h * each, of_head[1][n] = ahead[n] + h * each;
                score_few(rows, panels, of_head[0], size, m->queries + h * rows * dim, dim,
                          m->scores + h * rows * m->stride + key - start, m->stride, of_head[1]);
            }
        }
        for (long h = 0; h < heads; h++) {
            TileMemory own = *m;
            Past mine = *past;
            own.scores += h * rows * m->stride, own.sums += h * rows * m->dim_panels, own.turned += h * rows * dim, mine.kv_head += h;
            weigh_keys(rows, &mine, &own, from, to, so_far + h * rows, turns, scale, start, stop, end);
        }
        const T *weights = (const T *)m->scores;
#ifdef BF16
        for (int r = 0; r < heads * rows; r++)
            for (long k = 0; k < end - start; k += LANES)
                store_lanes(m->weights + r * m->stride + k, *(const lanes *)(m->scores + r * m->stride + k));
        weights = m->weights;
#endif
        for (long key = start, count; key < stop; key += count) {
            long blocks = 0;
            const long into = key % size, most = into ? 0 : (stop - key) / size < AT_A_TIME ? (stop - key) / size : AT_A_TIME;
            for (; blocks < most && all_seen(past, key + blocks * size, size); blocks++) {
                at[blocks] = value_block(past, (key + blocks * size) / size);
                if (!(ahead[blocks] = next_coming(coming))) ahead[blocks] = at[blocks];
            }
            count = blocks ? blocks * size : stop - key < size - into ? stop - key : size - into;
            for (long h = 0; h < heads; h++) {
                const T *mine = weights + h * rows * m->stride + key - start;
                float *sums = m->sums + h * rows * m->dim_panels;
                for (int n = 0; n < blocks; n++) of_head[0][n] = at[n] + h * each, of_head[1][n] = ahead[n] + h * each;
                if (blocks)
                    add_blocks(rows, of_head[0], blocks, size, dim, mine, m->stride, sums, m->dim_panels, key == past->start,
                               of_head[1]);
                for (long k = 0, some; k < count && !blocks; k += some) {
                    const C *seen[KEYS + 1];
                    Past own = *past;
                    own.kv_head += h;
                    some = count - k < KEYS ? count - k : KEYS;
                    find_values(&own, key + k, whole(some, PAIR), seen);
                    add_few(rows, dim / LANES, seen, whole(some, PAIR), 0, mine + k, m->stride, sums, m->dim_panels,
                            key + k == past->start);
                }
            }
        }
    }
    float inverse[TILE];
    for (int r = 0; r < heads * rows; r++) inverse[r] = 1.0f / so_far[r].sum;
    return store_means(heads * rows, m, dim, inverse, out);
}
