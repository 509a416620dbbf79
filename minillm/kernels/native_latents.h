// Attention over pages of latents (MLA), one token a sequence: all heads read one vector a position. Built in chapter 14.
//
// Both products read the pages as they lie. In the first the queries are the weights: LANES heads are a panel, which the latents of
// a block meet as rows, so scores stand as [key][head]. In the second the first columns of the latents are the panels, and the
// weights of the keys are the rows. What the heads share is read once for GROUP panels of them.
//
// A sequence is cut into parts of SPLIT keys from its first one on, whatever its company: each part leaves a softmax of its own,
// and the parts of a head are merged in their order.
#if !defined(KV_INT8) && !defined(KV_FP8) && !defined(KV_INT4)

typedef struct {
    T *latents;                 // [blocks, size, dim]
    long dim, value_dim, size;  // values are the first value_dim columns
} Latents;

enum { SPLIT = 5 * KEYS, APART = SPLIT + PAIR };

typedef struct {  // memory of a thread
    T *queries;     // [dim / PAIR][panels][LANES][PAIR]
    float *scores;  // [SPLIT][panels * LANES]
    T *weights;     // [panels * LANES][APART]
} PartMemory;

static size_t place_part(PartMemory *memory, char *at, long dim) {  // returns the bytes it takes
    PartMemory m;
    size_t used = 0;
#define PLACE(name, count) (m.name = (void *)(at + used), used += whole((count) * sizeof(*m.name), 64))
    PLACE(queries, dim * WIDTH);
    PLACE(scores, SPLIT * WIDTH);
    PLACE(weights, WIDTH * APART);
#undef PLACE
    *memory = m;
    return used;
}

static inline const T *latent_at(const Latents *p, const int32_t *table, long key) {
    return p->latents + (table[key / p->size] * p->size + key % p->size) * p->dim;
}

// The keys from `from` to `to` - 1 of a sequence, for `heads` heads from q on, up to WIDTH. Their weighted sums of values,
// [heads][width], and the largest score and the sum of weights of each head.
static void attend_part(const Latents *p, const PartMemory *m, const int32_t *table, long from, long to, const T *q, int heads,
                        long width, float scale, float *sums, float *most, float *total) {
    const int panels = (heads + LANES - 1) / LANES, row = panels * LANES;
    const long dim = p->dim, count = to - from;
    for (int h = 0; h < row; h++)
        for (long d = 0; d < dim; d++)
            m->queries[(d / PAIR * row + h) * PAIR + d % PAIR] = h < heads ? q[h * dim + d] : 0;
    for (long key = from; key < to;) {
        long left = p->size - key % p->size, here = left < to - key ? left : to - key;
        const T *latents = latent_at(p, table, key);
        for (long r = 0; r < here; r += ROWS)
            multiply_rows(here - r < ROWS ? here - r : ROWS, panels, panels, PAIR * LANES, latents + r * dim, dim, m->queries, dim,
                          m->scores + (key + r - from) * row, row, 1, (Ahead){});
        key += here;
    }
    for (int n = 0; n < panels; n++) {
        const float *scores = m->scores + n * LANES;
        lanes best = *(const lanes *)scores, sum = {};
        for (long k = 1; k < count; k++) best = larger(best, *(const lanes *)(scores + k * row));
        for (long k = 0; k < count; k++) {
            lanes weight = exp_lanes((*(const lanes *)(scores + k * row) - best) * scale);
            sum += weight;
            for (int l = 0; l < LANES; l++) m->weights[(n * LANES + l) * APART + k] = store(weight[l]);
        }
        for (int l = 0; l < LANES && n * LANES + l < heads; l++) {
            most[n * LANES + l] = best[l], total[n * LANES + l] = sum[l];
            for (long k = count; k % PAIR; k++) m->weights[(n * LANES + l) * APART + k] = 0;
        }
    }
    for (long key = 0; key < count; key += KEYS) {
        const long some = count - key < KEYS ? count - key : KEYS;
        const C *at[KEYS + 2];
        for (long k = 0; k < KEYS + 2; k++) at[k] = k < some ? latent_at(p, table, from + key + k) : NULL;
        for (long d = 0; d < width; d += WIDTH)
            for (int h = 0; h < heads; h += ROWS)
                add_few(heads - h < ROWS ? heads - h : ROWS, (width - d < WIDTH ? width - d : WIDTH) / LANES, at, whole(some, PAIR), d,
                        m->weights + h * APART + key, APART, sums + h * width + d, width, key == 0);
    }
}

static _Thread_local Workspace for_parts;

static inline long parts_of(const Sequences *seqs, long row) { return (seqs->lens[row] + SPLIT - 1) / SPLIT; }

// Write the latents k of all tokens into their slots, then let the `rows` first tokens, each the last of its sequence, attend:
// q [tokens, heads, dim], out [tokens, heads, value_dim]. Returns 1 if memory ran out.
int latent_attention(const Latents *p, const Sequences *seqs, const T *q, const T *k, long k_stride, T *out, long tokens, long rows,
                     long heads, float scale) {
    const long width = whole(p->value_dim, LANES), groups = (heads + WIDTH - 1) / WIDTH;
    long num_parts = 0, failed = 0;
    for (long i = 0; i < rows; i++) num_parts += parts_of(seqs, i);
    char *kept = reserve(&for_parts, num_parts * heads * (width + 2) * sizeof(float) + 64);
    if (!kept) return 1;
    float *sums = (float *)whole((long)kept, 64);  // of all parts, [heads][width]
    float *most = sums + num_parts * heads * width, *total = most + num_parts * heads;   // [heads]
#pragma omp parallel reduction(| : failed) num_threads(team_size())
    {
        PartMemory m;
        char *room = reserve(&for_tiles, place_part(&m, NULL, p->dim) + 64);
        failed |= !room;
        if (room) place_part(&m, (char *)whole((long)room, 64), p->dim);
#pragma omp for
        for (long i = 0; i < tokens; i++)
            memcpy(p->latents + seqs->slots[i] * p->dim, k + i * k_stride, p->dim * sizeof(T));
        long row = 0, before = 0;
#pragma omp for schedule(monotonic : dynamic)
        for (long item = 0; item < num_parts * groups; item++) {
            if (!room) continue;
            long part = item / groups, head = item % groups * WIDTH;
            while (part >= before + parts_of(seqs, row)) before += parts_of(seqs, row++);
            long from = (part - before) * SPLIT, to = from + SPLIT < seqs->lens[row] ? from + SPLIT : seqs->lens[row];
            long at = part * heads + head;
            attend_part(p, &m, seqs->table + row * seqs->max_blocks, from, to, q + (row * heads + head) * p->dim,
                        heads - head < WIDTH ? heads - head : WIDTH, width, scale, sums + at * width, most + at, total + at);
        }
        row = 0, before = 0;
#pragma omp for schedule(static)
        for (long item = 0; item < rows * heads; item++) {
            long head = item % heads;
            while (row < item / heads) before += parts_of(seqs, row++);
            const long end = before + parts_of(seqs, row);
            float best = -INFINITY, all = 0;
            for (long part = before; part < end; part++) best = most[part * heads + head] > best ? most[part * heads + head] : best;
            float *mean = sums + (before * heads + head) * width;
            for (long part = before; part < end; part++) {
                const float *mine = sums + (part * heads + head) * width;
                float weight = part == before && end == before + 1 ? 1 : fast_exp((most[part * heads + head] - best) * scale);
                all += weight * total[part * heads + head];
                for (long d = 0; d < width; d += LANES) {
                    lanes added = *(const lanes *)(mine + d) * weight;
                    *(lanes *)(mean + d) = part == before ? added : *(const lanes *)(mean + d) + added;
                }
            }
            T *to = out + item * p->value_dim;
            for (long d = 0; d < p->value_dim; d++) to[d] = before < end ? store(mean[d] / all) : 0;  // no positions: a row that fills up
        }
    }
    return failed != 0;
}
#endif
