// Attention over pages, in place: the step's keys and values go to their slots, then every query looks at its past.
// Built in chapter 14.

// The pages of one layer; see `native.Pages` and `minillm/kv_cache/paged.py`.
typedef struct {
    C *keys, *values;                  // [blocks, kv_heads, dim, size] and [blocks, kv_heads, size, dim]
    float *key_scales, *value_scales;  // [blocks, kv_heads, size], if SCALED
    long kv_heads, dim, size;
    long window, sinks;  // a query sees the last `window` keys (0: all of them), and the first `sinks` in any case
} Pages;

// The sequences of a batch, and where their tokens lie; see `native.Sequences` and `minillm/model/batch.py`.
typedef struct {
    const int64_t *starts, *lens;  // [num_seqs + 1] and [num_seqs]: tokens of the step, and positions after it
    const int32_t *table;          // [num_seqs, max_blocks]
    const int64_t *slots;          // [num_tokens]
    long num_seqs, max_blocks, max_seq_len;
} Sequences;

// What a tile of queries of one sequence reads of one KV head: the blocks of the sinks, then those of the window. They are
// numbered as if they lay side by side, and scores stand in that order.
typedef struct {
    const Pages *pages;
    const int32_t *table;
    long kv_head, sink_blocks, skipped;
} Past;

static inline long vectors_of(const Past *past, long block) {  // where the vectors of a block begin, counted in vectors
    const Pages *p = past->pages;
    return (past->table[block < past->sink_blocks ? block : block + past->skipped] * p->kv_heads + past->kv_head) * p->size;
}

static inline const C *key_block(const Past *past, long block) {
    return past->pages->keys + vectors_of(past, block) * past->pages->dim;
}

static inline const C *value_block(const Past *past, long block) {
    return past->pages->values + vectors_of(past, block) * past->pages->dim;
}

// Ask for a block of keys or values before it is needed: blocks lie anywhere, so the CPU cannot guess the next one.
static inline void prefetch(const C *block, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(C)) __builtin_prefetch(block + i);
}

// scores[row][key] of one block for up to ROWS queries. block is [dim][size]: keys lie transposed.
static inline __attribute__((always_inline)) void score_block(const int rows, const float *q, const C *block, const float *scales,
                                                              float *scores, long stride, long dim, long size) {
    long key = 0;
    for (; key + LANES <= size; key += LANES) {
        lanes sum[ROWS][2] = {};  // two chains of additions each, so that none waits for the one before
        long d = 0;
        for (; d + 2 <= dim; d += 2) {
            lanes even = read_lanes(block + d * size + key), odd = read_lanes(block + (d + 1) * size + key);
            for (int r = 0; r < rows; r++) {
                sum[r][0] += q[r * dim + d] * even;
                sum[r][1] += q[r * dim + d + 1] * odd;
            }
        }
        if (d < dim) {
            lanes last = read_lanes(block + d * size + key);
            for (int r = 0; r < rows; r++) sum[r][0] += q[r * dim + d] * last;
        }
        for (int r = 0; r < rows; r++) {
            lanes score = sum[r][0] + sum[r][1];
            *(lanes *)(scores + r * stride + key) = SCALED ? score * *(const lanes *)(scales + key) : score;
        }
    }
    for (; key < size; key++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (long d = 0; d < dim; d++) sum += q[r * dim + d] * read_one(block[d * size + key]);
            scores[r * stride + key] = SCALED ? sum * scales[key] : sum;
        }
}

// The same for the first `count` keys of a block, and any number of rows: the sinks are few.
static __attribute__((noinline)) void score_sinks(int rows, const float *q, const C *block, const float *scales, float *scores,
                                                  long stride, long dim, long size, long count) {
    for (int r = 0; r < rows; r++) {
        float *s = scores + r * stride;
        for (long key = 0; key < count; key++) s[key] = 0;
        for (long d = 0; d < dim; d++)
            for (long key = 0; key < count; key++) s[key] += q[r * dim + d] * read_one(block[d * size + key]);
        for (long key = 0; key < count && SCALED; key++) s[key] *= scales[key];
    }
}

// Scores to weights, which sum to 1 / *inverse: row r sees the keys from 0 to sinks - 1 and from `from` to `to` - 1.
static __attribute__((noinline)) void softmax_row(float *s, long sinks, long from, long to, long last, float *inverse) {
    float most = -INFINITY, sum = 0;
    for (long key = 0; key < sinks; key++) most = s[key] > most ? s[key] : most;
#pragma omp simd reduction(max : most)
    for (long key = from; key < to; key++) most = s[key] > most ? s[key] : most;
    for (long key = 0; key < sinks; key++) sum += s[key] = fast_exp(s[key] - most);
#pragma omp simd reduction(+ : sum)
    for (long key = from; key < to; key++) sum += s[key] = fast_exp(s[key] - most);
    for (long key = sinks; key < from; key++) s[key] = 0;
    for (long key = to; key < last; key++) s[key] = 0;
    *inverse = 1.0f / sum;
}

// Attention of up to ROWS queries of one sequence that read the same KV head. Row r sees the keys from[r] to to[r] - 1, and
// the sinks, which meet `turned` in place of q if there is one.
static inline __attribute__((always_inline)) void attend_rows(const int rows, const Past *past, const float *q,
                                                              const float *turned, const long *from, const long *to,
                                                              float *scores, long stride, T **out) {
    const Pages *p = past->pages;
    const long dim = p->dim, size = p->size, last = to[rows - 1], count = dim * size;
    // Rows are in order of position. Sums begin with a whole block, so that they are the same in any company: what a row does
    // not see has the weight 0.
    const long first_block = p->sinks ? 0 : from[0] / size, first = first_block * size;
    for (long block = first_block; block * size < last; block++) {
        if ((block + 1) * size < last) prefetch(key_block(past, block + 1), count);
        const C *keys = key_block(past, block);
        const float *scales = SCALED ? p->key_scales + vectors_of(past, block) : NULL;
        score_block(rows, q, keys, scales, scores + block * size, stride, dim, size);
        long sinks = turned ? p->sinks - block * size : 0;  // keys of this block that meet the turned queries
        if (sinks > 0) score_sinks(rows, turned, keys, scales, scores + block * size, stride, dim, size, sinks < size ? sinks : size);
    }
    float inverse[ROWS];
    for (int r = 0; r < rows; r++) {
        long sinks = p->sinks < to[r] ? p->sinks : to[r], start = from[r] > sinks ? from[r] : sinks;
        float *s = scores + r * stride;
        softmax_row(s, sinks, start, to[r], last, &inverse[r]);
        for (long block = first_block; SCALED && block * size < last; block++) {
            const float *scales = p->value_scales + vectors_of(past, block);
            for (long key = block * size; key < (block + 1) * size && key < last; key++)
                s[key] *= scales[key - block * size];
        }
    }
    long d = 0;
    for (; d + LANES <= dim; d += LANES) {
        lanes sum[ROWS][2] = {};
        for (long block = first_block; block * size < last; block++) {
            long key = block * size;
            long end = (block + 1) * size < last ? (block + 1) * size : last;
            if (d == 0 && end < last) prefetch(value_block(past, block + 1), count);
            const C *v = value_block(past, block) + d;
            for (; key + 2 <= end; key += 2, v += 2 * dim) {
                lanes even = read_lanes(v), odd = read_lanes(v + dim);
                for (int r = 0; r < rows; r++) {
                    sum[r][0] += scores[r * stride + key] * even;
                    sum[r][1] += scores[r * stride + key + 1] * odd;
                }
            }
            if (key < end) {
                lanes value = read_lanes(v);
                for (int r = 0; r < rows; r++) sum[r][0] += scores[r * stride + key] * value;
            }
        }
        for (int r = 0; r < rows; r++) {
            lanes mean = (sum[r][0] + sum[r][1]) * inverse[r];
            for (int l = 0; l < LANES; l++) out[r][d + l] = store(mean[l]);
        }
    }
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (long key = first; key < last; key++)
                sum += scores[r * stride + key] * read_one(value_block(past, key / size)[key % size * dim + d]);
            out[r][d] = store(sum * inverse[r]);
        }
}

static inline void store_token(const Pages *p, long slot, const T *k, const T *v) {
    for (long h = 0; h < p->kv_heads; h++) {
        long block = (slot / p->size * p->kv_heads + h) * p->size, offset = slot % p->size;  // counted in vectors
        store_vector(k + h * p->dim, p->dim, p->keys + block * p->dim + offset, p->size, p->key_scales + block + offset);
        store_vector(v + h * p->dim, p->dim, p->values + (block + offset) * p->dim, 1, p->value_scales + block + offset);
    }
}

static _Thread_local Workspace for_scores;

// Write the keys and values of all tokens into their slots, then let every query attend to its past over the pages.
// A tile is ROWS (token, query head) pairs of one sequence that share a KV head. `turn`, cos and then signed sin, each
// [num_tokens, dim], is what turns a query before it meets the sinks; NULL if it meets them as it is. Returns 1 if
// memory ran out.
int paged_attention(const Pages *p, const Sequences *seqs, const T *q, const T *k, const T *v, long q_stride, long k_stride,
                    long v_stride, const float *turn, T *out, long num_tokens, long heads, float scale) {
    const long dim = p->dim, size = p->size, half = dim / 2, group = heads / p->kv_heads, num_seqs = seqs->num_seqs;
    const int64_t *starts = seqs->starts;
    long failed = 0, *tiles = malloc((num_seqs + 1) * sizeof(long));  // tiles of the sequences before each
    if (!tiles) return 1;
    tiles[0] = 0;
    for (long s = 0; s < num_seqs; s++) tiles[s + 1] = tiles[s] + ((starts[s + 1] - starts[s]) * group + ROWS - 1) / ROWS;
    long sink_blocks = (p->sinks + size - 1) / size, most = seqs->max_seq_len;  // keys that a tile reads
    if (p->window && sink_blocks * size + p->window + ROWS < most) most = sink_blocks * size + p->window + ROWS;
    long stride = (most + 2 * size + LANES - 1) / LANES * LANES;
#pragma omp parallel reduction(| : failed)
    {
#pragma omp for
        for (long i = 0; i < num_tokens; i++) store_token(p, seqs->slots[i], k + i * k_stride, v + i * v_stride);
        float *scores = reserve(&for_scores, ROWS * (stride + 2 * dim) * sizeof(float));
        failed |= !scores;
#pragma omp for schedule(dynamic)
        for (long item = 0; item < tiles[num_seqs] * p->kv_heads; item++) {
            if (!scores) continue;
            long tile = item / p->kv_heads, seq = 0, high = num_seqs;
            while (high - seq > 1) {
                long middle = (seq + high) / 2;
                if (tiles[middle] <= tile) seq = middle; else high = middle;
            }
            long count = starts[seq + 1] - starts[seq], before = seqs->lens[seq] - count;
            long row = (tile - tiles[seq]) * ROWS, from[ROWS], to[ROWS];
            int rows = count * group - row < ROWS ? count * group - row : ROWS;
            long seen = p->window ? before + row / group + 1 - p->window : 0;  // from here on by the first row
            long skipped = seen / size > sink_blocks ? (seen / size - sink_blocks) * size : 0;
            Past past = {p, seqs->table + seq * seqs->max_blocks, item % p->kv_heads, sink_blocks, skipped / size};
            float *queries = scores + ROWS * stride, *turned = queries + ROWS * dim;
            T *places[ROWS];
            for (int r = 0; r < rows; r++) {
                long token = (row + r) / group, head = past.kv_head * group + (row + r) % group;
                const T *query = q + (starts[seq] + token) * q_stride + head * dim;
                to[r] = before + token + 1 - skipped;
                from[r] = p->window && to[r] + skipped > p->window ? to[r] - p->window : 0;
                places[r] = out + ((starts[seq] + token) * heads + head) * dim;
                for (long d = 0; d < dim; d++) queries[r * dim + d] = load(query[d]) * scale;
                if (!turn) continue;
                const float *cosine = turn + (starts[seq] + token) * dim, *sine = cosine + num_tokens * dim, *own = queries + r * dim;
                for (long d = 0; d < half; d++) {
                    turned[r * dim + d] = own[d] * cosine[d] + own[d + half] * sine[d];
                    turned[r * dim + d + half] = own[d + half] * cosine[d + half] + own[d] * sine[d + half];
                }
            }
            const float *sink_queries = turn ? turned : NULL;
            switch (rows) {  // a constant each, so that the compiler keeps all sums in registers
                case 1: attend_rows(1, &past, queries, sink_queries, from, to, scores, stride, places); break;
                case 2: attend_rows(2, &past, queries, sink_queries, from, to, scores, stride, places); break;
                case 3: attend_rows(3, &past, queries, sink_queries, from, to, scores, stride, places); break;
                case 4: attend_rows(4, &past, queries, sink_queries, from, to, scores, stride, places); break;
                case 5: attend_rows(5, &past, queries, sink_queries, from, to, scores, stride, places); break;
                case 6: attend_rows(6, &past, queries, sink_queries, from, to, scores, stride, places); break;
                case 7: attend_rows(7, &past, queries, sink_queries, from, to, scores, stride, places); break;
                default: attend_rows(8, &past, queries, sink_queries, from, to, scores, stride, places);
            }
        }
    }
    free(tiles);
    return failed;
}
