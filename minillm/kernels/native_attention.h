// Attention over pages, in place: every query of a tile looks at its past. Built in chapter 14.
//
// Both products are those of native_linear.h. WIDTH keys at a time, taken from their pages, are the panels that a tile's queries
// are multiplied with; then KEYS values at a time are the panels that the weights of the keys are multiplied with. Where the CPU
// has a matrix unit, pages without window and sinks are read by native_amx_attention.h.

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

// Multiply with what codes are scaled by: the scores of all keys that a row sees, or the weights of their values.
static void scale_keys(int rows, const Past *past, const float *scales, float *scores, long stride) {
    const long size = past->pages->size;
    for (long key = past->first; key < past->last; key++) {
        if (!is_seen(past, key)) continue;
        float scale = scales[vectors_of(past, key / size) + key % size];
        for (int r = 0; r < rows; r++) scores[r * stride + key - past->start] *= scale;
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
    part found[PARTS];
    for (int q = 0; q < PARTS; q++) found[q] = most - (part){};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int q = 0; q < PARTS; q++) found[q] = larger_part(found[q], *(const part *)(s + i + q * WIDE));
    for (int q = 0; i < count; i += WIDE, q++)
        found[q] = larger_part(found[q], either_part(first_of_part(count - i), *(const part *)(s + i), found[q]));
    for (int q = 1; q < PARTS; q++) found[0] = larger_part(found[0], found[q]);
    for (int l = 0; l < WIDE; l++) most = found[0][l] > most ? found[0][l] : most;
    return most;
}

// s = exp(scale * (s - most)); returns the sum.
static inline float exp_of(float *s, long count, float scale, float most) {
    union { lanes all; part of[PARTS]; } sum = {};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int q = 0; q < PARTS; q++) {
            part *here = (part *)(s + i + q * WIDE);
            sum.of[q] += *here = exp_part((*here - most) * scale);
        }
    for (int q = 0; i < count; i += WIDE, q++) {
        part *here = (part *)(s + i), made = exp_part((*here - most) * scale);
        int_part seen = first_of_part(count - i);
        *here = either_part(seen, made, *here);
        sum.of[q] += either_part(seen, made, (part){});
    }
    return sum_lanes(sum.all);
}

// Scores to weights, which sum to 1 / *inverse: a row sees the keys from 0 to sinks - 1 and from `from` to `to` - 1. `learned` is
// the score of a key without a value, a learned sink logit of the head; -INFINITY for none.
static void softmax_row(float *s, long sinks, long from, long to, long end, float learned, float scale, float *inverse) {
    float most = most_of(s + from, to - from, most_of(s, sinks, learned));
    float sum = exp_of(s, sinks, scale, most) + exp_of(s + from, to - from, scale, most);
    if (learned > -INFINITY) sum += fast_exp((learned - most) * scale);
    memset(s + sinks, 0, (from - sinks) * sizeof(float));
    memset(s + to, 0, (end - to) * sizeof(float));
    *inverse = 1.0f / sum;
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
    T *weights;                             // [ROWS][KEYS]; in the unit [TOGETHER][BLOCK]
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

// Scores of all keys to weights.
static void weigh_keys(int rows, const Past *past, const TileMemory *m, const long *from, const long *to, const float *learned, int turns,
                       float scale, long end, float *inverse) {
    const Pages *p = past->pages;
    const long start = past->start;
    if (turns) score_sinks(rows, m->turned, past, m->scores, m->stride);
    if (SCALED) scale_keys(rows, past, p->key_scales, m->scores, m->stride);
    for (int r = 0; r < rows; r++) {
        long sinks = p->sinks < to[r] ? p->sinks : to[r], begin = from[r] > sinks ? from[r] : sinks;
        if (!p->sinks) sinks = start;
        if (begin < start) begin = start;
        softmax_row(m->scores + r * m->stride, sinks - start, begin - start, to[r] - start, end - start, learned[r], scale,
                    &inverse[r]);
    }
    if (SCALED) scale_keys(rows, past, p->value_scales, m->scores, m->stride);
}

// How many of `left` panels are multiplied at once: two and two rather than three and one, which leaves most registers empty.
static inline long next_width(long left) { return left <= PANELS ? left : left == PANELS + 1 && PANELS == 3 ? 2 : PANELS; }

// Attention of up to TILE queries of one sequence that read the same KV head, in order of position. Row r sees the keys from[r]
// to to[r] - 1, and the sinks; learned[r] is its sink logit. Returns whether all of `out` is finite.
static int attend_tile(int rows, const Past *past, const TileMemory *m, const long *from, const long *to, const float *learned,
                       int turns, float scale, T **out, Coming *coming) {
    const Pages *p = past->pages;
    const long dim = p->dim, start = past->start, last = past->last, end = start + whole(last - start, LANES);
    for (long key = start; key < last; key += WIDTH) {
        long panels = (last - key + LANES - 1) / LANES;
        if (panels > PANELS) panels = PANELS;
        read_ahead(coming, (key - start + WIDTH) / p->size);
        take_keys(past, key, panels, m->vectors);
        for (int r = 0; r < rows; r += ROWS) {
            while (r + ROWS < rows && to[r + ROWS - 1] <= key) r += ROWS;  // none of these sees them
            multiply_near(rows - r < ROWS ? rows - r : ROWS, panels, m->queries + r * m->dim_pairs, m->dim_pairs, m->vectors,
                          m->dim_pairs, m->scores + r * m->stride + key - start, m->stride, 1);
        }
    }
    float inverse[TILE];
    weigh_keys(rows, past, m, from, to, learned, turns, scale, end, inverse);
    const long key_blocks = blocks_of(past);
    for (long key = start; key < last; key += KEYS) {
        long count = whole(last - key < KEYS ? last - key : KEYS, PAIR);
        const C *at[KEYS + 1];
        find_values(past, key, count, at);
        read_ahead(coming, key_blocks + (key - start + KEYS) / p->size);
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
                multiply_near(some, panels, weights, apart, m->vectors, seen, sums, m->dim_panels, key == start);
            }
        }
    }
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
    const long dim = p->dim, size = p->size, start = past->start, last = past->last, end = start + whole(last - start, LANES);
    const long heads = past->heads, each = size * dim / IN_BYTE;  // from one head's part of a block to the next
    const C *at[AT_A_TIME], *ahead[AT_A_TIME] = {}, *of_head[2][AT_A_TIME];
    long block = start / size, offset = 0;
    read_ahead(coming, 0);
    for (long key = start, panels; key < last; key += panels * LANES) {
        panels = (last - key + LANES - 1) / LANES < IN_PART ? (last - key + LANES - 1) / LANES : IN_PART;
        for (int n = 0; n < panels; n++) {
            at[n] = key_block(past, block) + offset;
            if (offset) ahead[n] = ahead[n ? n - 1 : IN_PART - 1] + dim * LANES / IN_BYTE;
            else if (!(ahead[n] = next_coming(coming))) ahead[n] = at[n];
            if ((offset += LANES) == size) block++, offset = 0;
        }
        for (long h = 0; h < heads; h++) {
            for (int n = 0; n < panels; n++) of_head[0][n] = at[n] + h * each, of_head[1][n] = ahead[n] + h * each;
            score_few(rows, panels, of_head[0], size, m->queries + h * rows * dim, dim, m->scores + h * rows * m->stride + key - start,
                      m->stride, of_head[1]);
        }
    }
    float inverse[TILE];
    for (long h = 0; h < heads; h++) {
        TileMemory own = *m;
        Past mine = *past;
        own.scores += h * rows * m->stride, own.turned += h * rows * dim, mine.kv_head += h;
        weigh_keys(rows, &mine, &own, from, to, learned + h * rows, turns, scale, end, inverse + h * rows);
    }
    const T *weights = (const T *)m->scores;
#ifdef BF16
    for (int r = 0; r < heads * rows; r++)
        for (long k = 0; k < end - start; k += LANES)
            store_lanes(m->weights + r * m->stride + k, *(const lanes *)(m->scores + r * m->stride + k));
    weights = m->weights;
#endif
    for (long key = start, count; key < last; key += count) {
        long blocks = 0;
        for (; blocks < AT_A_TIME && all_seen(past, key + blocks * size, size); blocks++) {
            at[blocks] = value_block(past, (key + blocks * size) / size);
            if (!(ahead[blocks] = next_coming(coming))) ahead[blocks] = at[blocks];
        }
        count = blocks ? blocks * size : last - key < size ? last - key : size;
        for (long h = 0; h < heads; h++) {
            const T *mine = weights + h * rows * m->stride + key - start;
            float *sums = m->sums + h * rows * m->dim_panels;
            for (int n = 0; n < blocks; n++) of_head[0][n] = at[n] + h * each, of_head[1][n] = ahead[n] + h * each;
            if (blocks)
                add_blocks(rows, of_head[0], blocks, size, dim, mine, m->stride, sums, m->dim_panels, key == start, of_head[1]);
            for (long k = 0, some; k < count && !blocks; k += some) {
                const C *seen[KEYS + 1];
                Past own = *past;
                own.kv_head += h;
                some = count - k < KEYS ? count - k : KEYS;
                find_values(&own, key + k, whole(some, PAIR), seen);
                add_few(rows, dim / LANES, seen, whole(some, PAIR), 0, mine + k, m->stride, sums, m->dim_panels, key + k == start);
            }
        }
    }
    return store_means(heads * rows, m, dim, inverse, out);
}
