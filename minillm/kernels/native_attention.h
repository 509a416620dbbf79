// Attention over pages, in place: every query looks at its past. Built in chapter 14.
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
    PLACE(weights, unit ? TOGETHER * BLOCK : ROWS * KEYS);
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

// Attention of up to TILE queries of one sequence that read the same KV head, in order of position. Row r sees the keys from[r]
// to to[r] - 1, and the sinks; learned[r] is its sink logit. Returns whether all of `out` is finite.
static int attend_tile(int rows, const Past *past, const TileMemory *m, const long *from, const long *to, const float *learned,
                        int turns, float scale, T **out) {
    const Pages *p = past->pages;
    const long dim = p->dim, start = past->start, last = past->last, end = start + whole(last - start, LANES);
    const int in_place = rows <= ROWS && start == past->first && p->size % LANES == 0 && dim % LANES == 0;
    PREFETCH_BLOCKS(key_block, past, past->first, start + WIDTH < last ? start + WIDTH : last);
    for (long key = start; key < last; key += WIDTH) {
        long panels = (last - key + LANES - 1) / LANES, next = key + WIDTH;
        if (panels > PANELS) panels = PANELS;
        if (next < last) PREFETCH_BLOCKS(key_block, past, next, next + WIDTH < last ? next + WIDTH : last);
        if (in_place) {
            const C *at[PANELS];
            for (int n = 0; n < panels; n++) at[n] = key_block(past, (key + n * LANES) / p->size) + (key + n * LANES) % p->size;
            score_few(rows, panels, at, p->size, m->queries, dim, m->scores + key - start, m->stride);
            continue;
        }
        take_keys(past, key, panels, m->vectors);
        for (int r = 0; r < rows; r += ROWS) {
            while (r + ROWS < rows && to[r + ROWS - 1] <= key) r += ROWS;  // none of these sees them
            multiply_rows(rows - r < ROWS ? rows - r : ROWS, panels, panels, PAIR * LANES, m->queries + r * m->dim_pairs, m->dim_pairs,
                          m->vectors, m->dim_pairs, m->scores + r * m->stride + key - start, m->stride, 1, (Ahead){});
        }
    }
    if (turns) score_sinks(rows, m->turned, past, m->scores, m->stride);
    if (SCALED) scale_keys(rows, past, p->key_scales, m->scores, m->stride);
    PREFETCH_BLOCKS(value_block, past, past->first, start + KEYS < last ? start + KEYS : last);
    float inverse[TILE];
    for (int r = 0; r < rows; r++) {
        long sinks = p->sinks < to[r] ? p->sinks : to[r], begin = from[r] > sinks ? from[r] : sinks;
        if (!p->sinks) sinks = start;
        if (begin < start) begin = start;
        softmax_row(m->scores + r * m->stride, sinks - start, begin - start, to[r] - start, end - start, learned[r], scale,
                    &inverse[r]);
    }
    if (SCALED) scale_keys(rows, past, p->value_scales, m->scores, m->stride);
    for (long key = start; key < last; key += KEYS) {
        long count = whole(last - key < KEYS ? last - key : KEYS, PAIR), next = key + KEYS;
        const C *at[KEYS + 1];
        find_values(past, key, count, at);
        if (next < last) PREFETCH_BLOCKS(value_block, past, next, next + KEYS < last ? next + KEYS : last);
        for (long d = 0; d < dim; d += WIDTH) {
            long panels = (dim - d + LANES - 1) / LANES;
            if (panels > PANELS) panels = PANELS;
            if (!in_place) take_values(at, count, d, panels, dim, m->vectors);
            for (int r = 0; r < rows; r += ROWS) {
                int some = rows - r < ROWS ? rows - r : ROWS;
                if (to[r + some - 1] <= key) continue;  // their weights are 0
                long apart;
                const T *weights = weights_of(m->scores + r * m->stride + key - start, m->stride, some, count, m->weights, &apart);
                float *sums = m->sums + r * m->dim_panels + d;
                long seen = to[r + some - 1] - key < count ? whole(to[r + some - 1] - key, PAIR) : count;  // of these rows
                if (in_place) add_few(some, panels, at, seen, d, weights, apart, sums, m->dim_panels, key == start);
                else multiply_rows(some, panels, panels, PAIR * LANES, weights, apart, m->vectors, seen, sums, m->dim_panels,
                                   key == start, (Ahead){});
            }
        }
    }
    return store_means(rows, m, dim, inverse, out);
}

static _Thread_local Workspace for_tiles;

// Queries that share a tile: as many as leave their scores in the second-level cache; in the unit, as many as leave work for all.
static inline long tile_rows(const Pages *p, const Sequences *seqs, long keys, long group) {
    if (uses_unit(p)) {
        long rows = UNIT_TILE, all = seqs->starts[seqs->num_seqs] * group * p->kv_heads;
        while (rows > TILE / 2 && all < 4 * rows * omp_get_num_threads()) rows /= 2;
        return rows;
    }
    long rows = (1L << 18) / (keys + 1) / ROWS * ROWS;
    return rows < 4 * ROWS ? 4 * ROWS : rows < TILE ? rows : TILE;
}

typedef struct {  // a call of `attend_all`
    const Pages *pages;
    const Sequences *seqs;
    const T *q;
    const float *turn;
    T *out;
    long q_stride, num_tokens, heads;
    float scale;
} Attention;

// Rows of sequence `seq` from its row `row` on, which are (token, query head) pairs of one KV head. Returns whether all that came
// of them is finite.
static int attend_rows(const Attention *a, const TileMemory *m, long seq, long kv_head, long row, int rows) {
    const Pages *p = a->pages;
    const Sequences *seqs = a->seqs;
    const int64_t *starts = seqs->starts;
    const long dim = p->dim, size = p->size, half = dim / 2, group = a->heads / p->kv_heads;
    long sink_blocks = (p->sinks + size - 1) / size, known = seqs->lens[seq] - (starts[seq + 1] - starts[seq]);
    long from[UNIT_TILE], to[UNIT_TILE];
    long seen = p->window ? known + row / group + 1 - p->window : 0;  // from here on by the first row
    long skipped = seen / size > sink_blocks ? (seen / size - sink_blocks) * size : 0;
    // Pairs of keys are those of an even position and the next, in any company. Behind sinks that may take a block that is not
    // read, or two where the blocks of the sinks end within a pair.
    long hole = !p->sinks || !skipped ? 0 : skipped % PAIR ? size : sink_blocks * size % PAIR ? 2 * size : 0;
    skipped -= hole;
    Past past = {p, seqs->table + seq * seqs->max_blocks, kv_head, sink_blocks, skipped / size, .hole = hole, .sinks = p->sinks};
    T *places[UNIT_TILE];
    float learned[UNIT_TILE];
    for (int r = 0; r < rows; r++) {
        long token = (row + r) / group, head = kv_head * group + (row + r) % group;
        const T *query = a->q + (starts[seq] + token) * a->q_stride + head * dim;
        to[r] = known + token + 1 - skipped;
        from[r] = p->window && to[r] + skipped > p->window ? to[r] - p->window : 0;
        places[r] = a->out + ((starts[seq] + token) * a->heads + head) * dim;
        learned[r] = p->sink_logits ? p->sink_logits[head] / a->scale : -INFINITY;
        T *mine = m->queries + r * m->dim_pairs;
        memcpy(mine, query, dim * sizeof(T));
        for (long d = dim; d < m->dim_pairs; d++) mine[d] = 0;
        if (!a->turn) continue;
        const float *cosine = a->turn + (starts[seq] + token) * dim, *sine = cosine + a->num_tokens * dim;
        float *turned = m->turned + r * dim;
        for (long d = 0; d < half; d++) {
            turned[d] = load(query[d]) * cosine[d] + load(query[d + half]) * sine[d];
            turned[d + half] = load(query[d + half]) * cosine[d + half] + load(query[d]) * sine[d + half];
        }
    }
    past.from = from[0];
    // Sums begin with a whole block, so that they are the same in any company: what a row does not see has the weight 0.
    past.first = p->sinks ? 0 : from[0] / size * size;
    past.start = p->sinks ? 0 : past.first - (past.first + skipped) % PAIR;
    past.last = to[rows - 1];
#ifdef IN_TILES
    if (uses_unit(p)) return attend_in_unit(rows, &past, m, to, learned, a->scale, places);
#endif
    return attend_tile(rows, &past, m, from, to, learned, a->turn != NULL && p->sinks, a->scale, places);
}

// Inside a parallel region, when the step's keys and values are in their slots: let every query attend to its past over the
// pages. A tile is up to TILE (token, query head) pairs of one sequence that share a KV head. `turn`, cos and then signed sin,
// each [num_tokens, dim], is what turns a query before it meets the sinks; NULL if it meets them as it is. Returns 1 if memory
// ran out.
static long attend_all(const Pages *p, const Sequences *seqs, const T *q, long q_stride, const float *turn, T *out, long num_tokens,
                       long heads, float scale) {
    SPAN(ATTENTION);
    const Attention attention = {p, seqs, q, turn, out, q_stride, num_tokens, heads, scale};
    const int64_t *starts = seqs->starts;
    const long size = p->size, group = heads / p->kv_heads, num_seqs = seqs->num_seqs;
    long sink_blocks = (p->sinks + size - 1) / size, most = seqs->max_seq_len;  // keys that a tile reads
    const long in_window = sink_blocks * size + p->window + TILE + 3 * size;
    if (p->window && in_window < most) most = in_window;
    const long height = tile_rows(p, seqs, most, group);
    TileMemory m;
    begin_tiles(!SCALED);  // codes are read by way of subnormal numbers
    char *room = reserve(&for_tiles, place_tile(&m, NULL, p->dim, most, height, uses_unit(p)) + 64);
    if (room) place_tile(&m, (char *)whole((long)room, 64), p->dim, most, height, uses_unit(p));
    long num_tiles = 0, seq = num_seqs;
    for (long s = 0; s < num_seqs; s++) num_tiles += ((starts[s + 1] - starts[s]) * group + height - 1) / height;
    long before = num_tiles;
#pragma omp for schedule(monotonic : dynamic)
    for (long item = num_tiles * p->kv_heads - 1; item >= 0; item--) {  // the last queries of a prompt have most to read
        if (!room) continue;
        long tile = item / p->kv_heads, kv_head = item % p->kv_heads;
        while (tile < before) seq--, before -= ((starts[seq + 1] - starts[seq]) * group + height - 1) / height;
        long row = (tile - before) * height, left = (starts[seq + 1] - starts[seq]) * group - row;
        int rows = left < height ? left : height;
        if (attend_rows(&attention, &m, seq, kv_head, row, rows)) continue;
        // What another row sees is multiplied by the weight 0, and of a value that is not finite that is no number: each row alone.
        for (int r = 0; r < rows && rows > 1; r++) attend_rows(&attention, &m, seq, kv_head, row + r, 1);
    }
    end_tiles();
    return !room;
}

// Write the keys and values of all tokens into their slots, then `attend_all`.
int paged_attention(const Pages *p, const Sequences *seqs, const T *q, const T *k, const T *v, long q_stride, long k_stride,
                    long v_stride, const float *turn, T *out, long num_tokens, long heads, float scale) {
    long failed = 0;
#pragma omp parallel reduction(| : failed) num_threads(team_size())
    {
#pragma omp for
        for (long i = 0; i < num_tokens; i++) store_token(p, seqs->slots[i], k + i * k_stride, v + i * v_stride);
        failed |= attend_all(p, seqs, q, q_stride, turn, out, num_tokens, heads, scale);
    }
    return failed;
}
