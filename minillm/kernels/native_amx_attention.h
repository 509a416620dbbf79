// Attention in the CPU's matrix unit: blocks of keys and an online softmax (FlashAttention, chapter 12), so that scores and weights
// stay in the nearest cache. Built in chapter 14.
//
// A tile of queries goes through its keys BLOCK at a time. Of each block, keys and values are taken from their pages as panels,
// once for all rows of the tile; then two times TILE_ROWS rows after the other have their scores made, turned into weights, and
// multiplied with the values:
//
//     scores  [32][BLOCK] float     = queries [32][dim] x keys [dim][BLOCK]
//     weights [32][BLOCK] bfloat16  = 2^(scale * (scores - most)), `most` the largest score so far: where it grows, what was summed
//                                     before shrinks by as much
//     sums    [32][dim]   float    += weights x values [BLOCK][dim]
//
// Blocks begin at whole multiples of BLOCK for every row, so that its bits do not depend on its company. Few queries, as in a decode
// step, take the same steps over keys and values in their pages (native_few.h).
#ifdef IN_TILES
typedef struct {  // the online softmax of each row, over the keys so far
    float most[UNIT_TILE] __attribute__((aligned(64)));  // the largest score
    lanes sum[UNIT_TILE];                                // of the weights, lane by lane
} Running;

// 2^x for x < 1, relative error 3e-6: what is made of it is rounded to bfloat16. 2^0 is 1 exactly: a row that sees nothing of a
// block keeps what it has. Below -125.5 it is 0, since the unit takes subnormal numbers for 0 and other instructions are slow with
// them. Of NaN it is NaN.
static inline lanes exp2_lanes(lanes x) {
    __m512 n = _mm512_roundscale_ps((__m512)x, 0);
    lanes f = x - (lanes)n;
    lanes p = 1.0f + f * (0.693124175f + f * (0.240240991f + f * (0.0559064262f + f * 0.00958285294f)));
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.5f), _CMP_NLT_UQ);
    return (lanes)_mm512_maskz_scalef_ps(kept, (__m512)p, n);
}

// What the scores of a block are: `scales` are those of its keys and then of its values, if SCALED.
static inline lanes score_at(const float *scores, const float *scales, long i) {
    lanes here = *(const lanes *)(scores + i);
    return SCALED ? here * *(const lanes *)(scales + i) : here;
}

static inline lanes with_value(lanes weight, const float *scales, long i) {
    return SCALED ? weight * *(const lanes *)(scales + BLOCK + i) : weight;
}

// The largest of `seen` scores, and of those before.
static inline float most_score(const float *scores, const float *scales, long seen, float most) {
    lanes found = most - (lanes){};
    long i = 0;
    for (; i + LANES <= seen; i += LANES) found = larger(found, score_at(scores, scales, i));
    if (i < seen) found = larger(found, either(first_lanes(seen - i), score_at(scores, scales, i), found));
    return _mm512_reduce_max_ps((__m512)found);
}

// The scores of a row to weights in T, zeros behind them up to `end`; `scale` is in powers of 2. Returns `sum` and theirs.
static inline lanes weigh(const float *scores, const float *scales, long seen, long end, float scale, float most, T *weights,
                          lanes sum) {
    long i = 0;
    for (; i + LANES <= seen; i += LANES) {
        lanes weight = exp2_lanes((score_at(scores, scales, i) - most) * scale);
        sum += weight;
        store_lanes(weights + i, with_value(weight, scales, i));
    }
    if (i < seen) {
        ints in = first_lanes(seen - i);
        lanes weight = exp2_lanes((score_at(scores, scales, i) - most) * scale);
        sum += either(in, weight, (lanes){});
        store_lanes(weights + i, either(in, with_value(weight, scales, i), (lanes){}));
        i += LANES;
    }
    for (; i < end; i += LANES) store_lanes(weights + i, (lanes){});
    return sum;
}

// The scores of up to TOGETHER rows, from row `first` on, with a block that begins at `key` and has `count` keys become weights.
// Where the largest score grows, what was summed before is rescaled.
static inline void update_softmax(Running *running, int first, int rows, const TileMemory *m, const long *to, long key, long count,
                                  long end, float scale, const float *scales, long dim) {
    float most[TOGETHER] __attribute__((aligned(64))) = {}, rescale[TOGETHER] __attribute__((aligned(64)));
    long seen[TOGETHER];
    for (int r = 0; r < rows; r++) {
        seen[r] = to[first + r] - key < 0 ? 0 : to[first + r] - key < count ? to[first + r] - key : count;
        most[r] = most_score(m->scores + r * BLOCK, scales, seen[r], running->most[first + r]);
    }
    for (int r = 0; r < rows; r += LANES) {
        lanes *before = (lanes *)(running->most + first + r), *here = (lanes *)(most + r), now = *here;
        *here = either(now == -INFINITY, (lanes){}, now);  // where all scores are -INFINITY their weights are 0
        *(lanes *)(rescale + r) = exp2_lanes((*before - *here) * scale);
        *before = now;
    }
    for (int r = 0; r < rows; r++) {
        float *sums = m->sums + (first + r) * dim;
        for (long d = 0; d < dim && key; d += LANES) *(lanes *)(sums + d) *= rescale[r];
        running->sum[first + r] = weigh(m->scores + r * BLOCK, scales, seen[r], end, scale, most[r], m->weights + r * BLOCK,
                                    running->sum[first + r] * rescale[r]);
    }
}

// What the codes of a block's keys and values are scaled by.
static void take_scales(const Past *past, long key, long count, float *scales) {
    const long size = past->pages->size;
    for (long k = 0; k < count; k++) {
        long place = vectors_of(past, (key + k) / size) + (key + k) % size;
        scales[k] = past->pages->key_scales[place], scales[BLOCK + k] = past->pages->value_scales[place];
    }
}

// Attention of up to UNIT_TILE queries; see `attend_tile`. No window and no sinks: uses_unit.
static int attend_in_unit(int rows, const Past *past, const TileMemory *m, const long *to, const float *learned, float scale,
                          T **out, Coming *coming) {
    const Pages *p = past->pages;
    const long dim = p->dim, size = p->size, last = past->last;
    const int in_place = rows <= ROWS && size % LANES == 0;
    float scales[2 * BLOCK];
    Running running;
    for (int r = 0; r < rows; r++) {
        running.most[r] = learned[r], running.sum[r] = (lanes){};
        if (learned[r] > -INFINITY) running.sum[r][0] = 1;  // a key without a value
    }
    if (in_place) widen(m->queries, rows * dim, m->widened);
    for (long key = 0; key < last; key += BLOCK) {
        const long count = last - key < BLOCK ? last - key : BLOCK;
        const C *values[BLOCK + 1];
        find_values(past, key, whole(count, TILE_INPUTS), values);
        read_ahead(coming, (2 * key + count) / size);
        if (SCALED) take_scales(past, key, count, scales);
#define PANELS_FROM(from, count) ((count) - (from) < WIDTH ? ((count) - (from) + LANES - 1) / LANES : PANELS)
#define VALUES_FROM(d) (dim - (d) == 4 * LANES ? 2 : PANELS_FROM(d, dim))  // one alone would wait for its own sums
        if (!in_place) {
            for (long k = 0; k < count; k += WIDTH) take_keys(past, key + k, PANELS_FROM(k, count), m->vectors + k * dim);
            for (long d = 0; d < dim; d += VALUES_FROM(d) * LANES)
                take_values(values, whole(count, TILE_INPUTS), d, VALUES_FROM(d), dim, m->values + d * BLOCK);
        }
        read_ahead(coming, (2 * key + 2 * count) / size);
        for (int first = 0, some; first < rows; first += some) {
            some = rows - first < TOGETHER ? rows - first : TOGETHER;
            long seen = to[first + some - 1] - key;
            if (seen <= 0) continue;
            if (seen > count) seen = count;
            for (long k = 0; k < seen; k += WIDTH) {
                const int panels = PANELS_FROM(k, count);
                const C *at[PANELS];
                for (int n = 0; n < panels && in_place; n++) {
                    long here = key + k + n * LANES;
                    at[n] = key_block(past, here / size) + here % size;
                }
                if (in_place) score_few_by_tiles(rows, panels, at, size, m->widened, dim, m->scores + k, BLOCK);
                else multiply_tiles(some, panels, m->queries + first * dim, dim, m->vectors + k * dim, panels * PAIR * LANES, dim,
                                    m->scores + k, BLOCK, 1, 0);
            }
            update_softmax(&running, first, some, m, to, key, count, whole(seen, TILE_INPUTS), scale * 1.44269504f, scales, dim);
            for (int r = 0; r < rows && in_place; r++)
                widen(m->weights + r * BLOCK, whole(seen, TILE_INPUTS), m->widened + rows * dim + r * BLOCK);
            for (long d = 0, panels; d < dim; d += panels * LANES) {
                panels = VALUES_FROM(d);
                if (in_place) add_few_by_tiles(rows, panels, values, whole(seen, TILE_INPUTS), d, m->widened + rows * dim, m->sums + d,
                                               dim, !key);
                else multiply_tiles(some, panels, m->weights, BLOCK, m->values + d * BLOCK, panels * PAIR * LANES,
                                    whole(seen, TILE_INPUTS), m->sums + first * dim + d, dim, !key, 0);
            }
        }
#undef VALUES_FROM
#undef PANELS_FROM
    }
    float inverse[UNIT_TILE];
    for (int r = 0; r < rows; r++) inverse[r] = 1.0f / _mm512_reduce_add_ps((__m512)running.sum[r]);
    return store_means(rows, m, dim, inverse, out);
}
#endif
