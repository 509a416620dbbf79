// The tiles of a batch, and which thread computes which: each takes the next one when it has time, and while there are enough for
// all it knows the one after, whose keys it prefetches. Built in chapter 14.

static _Thread_local Workspace for_tiles;

// Queries that share a tile: few enough to leave work for all threads. Where all their keys are one block, as many as leave their
// scores in the second-level cache.
static inline long tile_rows(const Pages *p, const Sequences *seqs, long keys, long group) {
    const long all = seqs->starts[seqs->num_seqs] * group * p->kv_heads, threads = omp_get_num_threads();
    const int unit = uses_unit(p);
    if (unit || keys_of_block(p)) {
        long rows = unit ? UNIT_TILE : TILE;
        while (rows > (unit ? TOGETHER : SMALL_TILE) && all < (unit ? 4 : 8) * rows * threads) rows /= 2;
        return rows;
    }
    long rows = (1L << 18) / (keys + 1) / ROWS * ROWS;
    return rows < 4 * ROWS ? 4 * ROWS : rows < SMALL_TILE ? rows : SMALL_TILE;
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

// What a tile computes: so many rows of a sequence from its row `row` on, which are (token, query head) pairs of one KV head; or
// the same of several heads.
typedef struct {
    long seq, row;
    int rows;
    Past past;
} Tile;

static Tile tile_of(const Attention *a, long seq, long kv_head, long heads, long row, int rows) {
    const Pages *p = a->pages;
    const Sequences *seqs = a->seqs;
    const long size = p->size, group = a->heads / p->kv_heads, known = seqs->lens[seq] - (seqs->starts[seq + 1] - seqs->starts[seq]);
    long sink_blocks = (p->sinks + size - 1) / size;
    long seen = p->window ? known + row / group + 1 - p->window : 0;  // from here on by the first row
    long skipped = seen / size > sink_blocks ? (seen / size - sink_blocks) * size : 0;
    // Pairs of keys are those of an even position and the next, in any company. Behind sinks that may take a block that is not
    // read, or two where the blocks of the sinks end within a pair.
    long hole = !p->sinks || !skipped ? 0 : skipped % PAIR ? size : sink_blocks * size % PAIR ? 2 * size : 0;
    skipped -= hole;
    Past past = {p, seqs->table + seq * seqs->max_blocks, kv_head, heads, sink_blocks, skipped / size, .hole = hole, .sinks = p->sinks};
    past.from = seen - skipped > 0 ? seen - skipped : 0;
    // Sums begin with a whole block, so that they are the same in any company: what a row does not see has the weight 0.
    past.first = p->sinks ? 0 : past.from / size * size;
    past.start = p->sinks ? 0 : past.first - (past.first + skipped) % PAIR;
    past.last = known + (row + rows - 1) / group + 1 - skipped;
    return (Tile){seq, row, rows, past};
}

// Returns whether all that came of it is finite.
static int attend_rows(const Attention *a, const TileMemory *m, const Tile *tile, Coming *coming) {
    const Past *past = &tile->past;
    const Pages *p = a->pages;
    const int64_t *starts = a->seqs->starts;
    const long dim = p->dim, half = dim / 2, group = a->heads / p->kv_heads, first = starts[tile->seq], row = tile->row;
    const long known = a->seqs->lens[tile->seq] - (starts[tile->seq + 1] - first) - past->skipped * p->size;
    long from[UNIT_TILE], to[UNIT_TILE];
    T *places[UNIT_TILE];
    float learned[UNIT_TILE];
    for (int i = 0; i < past->heads * tile->rows; i++) {
        int r = i % tile->rows;
        long token = (row + r) / group, head = (past->kv_head + i / tile->rows) * group + (row + r) % group;
        const T *query = a->q + (first + token) * a->q_stride + head * dim;
        to[r] = known + token + 1;
        from[r] = p->window && to[r] > p->window ? to[r] - p->window : 0;
        places[i] = a->out + ((first + token) * a->heads + head) * dim;
        learned[i] = p->sink_logits ? p->sink_logits[head] / a->scale : -INFINITY;
        T *mine = m->queries + i * m->dim_pairs;
        memcpy(mine, query, dim * sizeof(T));
        for (long d = dim; d < m->dim_pairs; d++) mine[d] = 0;
        if (!a->turn) continue;
        const float *cosine = a->turn + (first + token) * dim, *sine = cosine + a->num_tokens * dim;
        float *turned = m->turned + i * dim;
        for (long d = 0; d < half; d++) {
            turned[d] = load(query[d]) * cosine[d] + load(query[d + half]) * sine[d];
            turned[d + half] = load(query[d + half]) * cosine[d + half] + load(query[d]) * sine[d + half];
        }
    }
#ifdef IN_TILES
    if (uses_unit(p)) return attend_in_unit(tile->rows, past, m, to, learned, a->scale, places, coming);
#endif
    return (tile->rows <= ROWS && read_in_place(p) ? attend_few : attend_tile)(tile->rows, past, m, from, to, learned,
                                                                              a->turn != NULL && p->sinks, a->scale, places, coming);
}

// Tiles in the order in which they are taken: the last queries of a prompt have most to read.
typedef struct {
    const Attention *of;
    long height;     // rows of a tile, at most
    int together;    // whether few rows read all KV heads: blocks of all heads are read from front to back
    long count, seq, before;  // of all tiles; those before sequence `seq` are still to be taken
} Tiles;

static inline long rows_of(const Attention *a, long seq) {
    return (a->seqs->starts[seq + 1] - a->seqs->starts[seq]) * (a->heads / a->pages->kv_heads);
}

static inline int is_together(const Tiles *tiles, long rows) {
    return tiles->together && rows > 0 && rows <= ROWS && rows * tiles->of->pages->kv_heads <= tiles->height;
}

static inline long tiles_of(const Tiles *tiles, long seq) {
    long rows = rows_of(tiles->of, seq);
    return is_together(tiles, rows) ? 1 : (rows + tiles->height - 1) / tiles->height * tiles->of->pages->kv_heads;
}

// Take the next one. `taken` counts those of all threads. Returns 0 if there is none.
static int take_tile(Tiles *tiles, long *taken, Tile *tile) {
    long number = tiles->count - 1 - __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED), kv_heads = tiles->of->pages->kv_heads;
    if (number < 0) return 0;
    while (number < tiles->before) tiles->seq--, tiles->before -= tiles_of(tiles, tiles->seq);
    long rows = rows_of(tiles->of, tiles->seq), row = (number - tiles->before) / kv_heads * tiles->height;
    if (is_together(tiles, rows)) *tile = tile_of(tiles->of, tiles->seq, 0, kv_heads, 0, rows);
    else *tile = tile_of(tiles->of, tiles->seq, (number - tiles->before) % kv_heads, 1, row,
                         rows - row < tiles->height ? rows - row : tiles->height);
    return 1;
}

static _Thread_local Workspace for_feed;

// From here on the products of this thread bring its share of these pages nearer.
static void begin_feed(const Pages *p, const Sequences *seqs) {
    const long threads = omp_get_num_threads(), thread = omp_get_thread_num();
    feed.left = 0;
    if (!p || p->window || p->sinks || seqs->num_seqs <= 2 * ROWS) return;
    long count = 0, bytes = p->kv_heads * p->dim / IN_BYTE * p->size * (long)sizeof(C);
    for (long s = thread; s < seqs->num_seqs; s += threads) count += 2 * ((seqs->lens[s] + p->size - 1) / p->size);
    const char **blocks = reserve(&for_feed, count * sizeof *blocks);
    if (!blocks) return;
    feed = (Feed){blocks, .bytes = bytes};
    for (long s = thread; s < seqs->num_seqs; s += threads)
        for (long b = 0; b < (seqs->lens[s] + p->size - 1) / p->size; b++) {
            long place = seqs->table[s * seqs->max_blocks + b] * bytes;
            blocks[feed.count++] = (const char *)p->keys + place, blocks[feed.count++] = (const char *)p->values + place;
        }
    next_block_of_feed();
}

// Inside a parallel region, when the step's keys and values are in their slots: let every query attend to its past over the
// pages. A tile is up to TILE (token, query head) pairs of one sequence that share a KV head. `turn`, cos and then signed sin,
// each [num_tokens, dim], is what turns a query before it meets the sinks; NULL if it meets them as it is. `taken`, shared by the
// threads, is 0 before. A thread may be done before the others. Returns 1 if memory ran out.
static long attend_all(const Pages *p, const Sequences *seqs, const T *q, long q_stride, const float *turn, T *out, long num_tokens,
                       long heads, float scale, long *taken) {
    SPAN(ATTENTION);
    const Attention attention = {p, seqs, q, turn, out, q_stride, num_tokens, heads, scale};
    const long size = p->size, group = heads / p->kv_heads;
    long sink_blocks = (p->sinks + size - 1) / size, most = seqs->max_seq_len;  // keys that a tile reads
    const long in_window = sink_blocks * size + p->window + SMALL_TILE + 3 * size;
    if (p->window && in_window < most) most = in_window;
    const long in_block = uses_unit(p) ? BLOCK : keys_of_block(p), kept = in_block && in_block < most ? in_block : most;
    Tiles tiles = {&attention, tile_rows(p, seqs, most, group), .seq = seqs->num_seqs};
    tiles.together = read_in_place(p) && !uses_unit(p) && seqs->num_seqs >= 4 * omp_get_num_threads();
    for (long s = 0; s < seqs->num_seqs; s++) tiles.count += tiles_of(&tiles, s);
    tiles.before = tiles.count;
    TileMemory m;
    begin_tiles(!SCALED);  // codes are read by way of subnormal numbers
    char *room = reserve(&for_tiles, place_tile(&m, NULL, p->dim, kept, tiles.height, uses_unit(p)) + 64);
    if (room) place_tile(&m, (char *)whole((long)room, 64), p->dim, kept, tiles.height, uses_unit(p));
    Tile tile, next;
    Coming coming = {.span = !in_block ? 0 : size < in_block ? in_block / size : 1};
    for (int more = room && take_tile(&tiles, taken, &tile); more; tile = next) {
        // Only while there are enough for all is the next one taken before its time.
        int known = tiles.count - __atomic_load_n(taken, __ATOMIC_RELAXED) > 2 * omp_get_num_threads() && take_tile(&tiles, taken, &next);
        coming.now = &tile.past, coming.next = known ? &next.past : NULL;
        int finite = attend_rows(&attention, &m, &tile, &coming);
        // What another row sees is multiplied by the weight 0, and of a value that is not finite that is no number: each row alone.
        const int all = tile.past.heads * tile.rows;
        for (int i = 0; i < all && all > 1 && !finite; i++) {
            Tile one = tile_of(&attention, tile.seq, tile.past.kv_head + i / tile.rows, 1, tile.row + i % tile.rows, 1);
            Coming nothing = {&one.past, NULL, 2 * blocks_of(&one.past), coming.span};
            attend_rows(&attention, &m, &one, &nothing);
        }
        long own = 2 * blocks_of(&tile.past);
        coming.at = known && coming.at > own ? coming.at - own : 0;
        more = known || take_tile(&tiles, taken, &next);
    }
    end_tiles();
#ifdef TIMED
#pragma omp barrier
#endif
    return !room;
}

// Write the keys and values of all tokens into their slots, then `attend_all`.
int paged_attention(const Pages *p, const Sequences *seqs, const T *q, const T *k, const T *v, long q_stride, long k_stride,
                    long v_stride, const float *turn, T *out, long num_tokens, long heads, float scale) {
    long failed = 0, taken = 0;
#pragma omp parallel reduction(| : failed) num_threads(team_size())
    {
#pragma omp for
        for (long i = 0; i < num_tokens; i++) store_token(p, seqs->slots[i], k + i * k_stride, v + i * v_stride);
        failed |= attend_all(p, seqs, q, q_stride, turn, out, num_tokens, heads, scale, &taken);
    }
    return failed;
}
