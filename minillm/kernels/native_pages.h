// The keys and values of a step go to their slots in the pages, and come from the pages as the panels of a product. Built in
// chapter 14.

// The pages of one layer; see `native.Pages` and `minillm/kv_cache/paged.py`.
typedef struct {
    C *keys, *values;                  // [blocks, kv_heads, dim / IN_BYTE, size] and [blocks, kv_heads, size, dim / IN_BYTE]
    float *key_scales, *value_scales;  // [blocks, kv_heads, size], if SCALED
    const float *sink_logits;          // [heads], learned, each in the denominator of its head's softmax; or NULL
    long kv_heads, dim, size;
    long window, sinks;  // a query sees the last `window` keys (0: all of them), and the first `sinks` in any case
} Pages;

// The sequences of a batch, and where their tokens lie; see `native.Sequences` and `minillm/model/batch.py`.
typedef struct {
    const int64_t *starts, *lens;  // [num_seqs + 1] and [num_seqs]: tokens of the step, and positions after it
    const int32_t *table;          // [num_seqs, max_blocks]
    const int64_t *slots;          // [num_tokens]
    long num_seqs, max_blocks, max_seq_len;
    const int32_t *token_slots;    // [num_tokens]: each token's LoRA adapter, -1 for none; or NULL
} Sequences;

// What a tile of queries of one sequence reads of one KV head: the blocks of the sinks, then those of the window. They are
// numbered as if they lay side by side, and scores stand in that order.
typedef struct {
    const Pages *pages;
    const int32_t *table;
    long kv_head, heads;  // which KV head is read, and how many from it on
    long sink_blocks, skipped;
    long start, first, last;  // scores stand from `start` on; keys are read from `first` to last - 1,
    long hole;                // but for so many behind the blocks of the sinks
    long sinks, from;         // no row sees a key from `sinks` to from - 1, or one before `from` where there are no sinks
} Past;

static inline int is_read(const Past *past, long key) {
    long beyond = key - past->sink_blocks * past->pages->size;
    return key >= past->first && key < past->last && (beyond < 0 || beyond >= past->hole);
}

// Whether a row may see the key. Of others no value and no scale is read: 0 times what is stored there may be no number. `start`
// may be -1.
static inline int is_seen(const Past *past, long key) {
    return key < past->last && (key >= past->from || (key >= 0 && key < past->sinks));
}

enum {
    TILE = 24 * ROWS,       // queries that keys and values are taken from their pages for at once
    SMALL_TILE = 8 * ROWS,  // at most where all keys are one block; larger tiles than this are halved where there is little to do
    KEYS = 96,              // values that are taken at once
};

static inline long vectors_of(const Past *past, long block) {  // where the vectors of a block begin, counted in vectors
    const Pages *p = past->pages;
    return (past->table[block < past->sink_blocks ? block : block + past->skipped] * p->kv_heads + past->kv_head) * p->size;
}

static inline const C *key_block(const Past *past, long block) {
    return past->pages->keys + vectors_of(past, block) * (past->pages->dim / IN_BYTE);
}

static inline const C *value_block(const Past *past, long block) {
    return past->pages->values + vectors_of(past, block) * (past->pages->dim / IN_BYTE);
}

// Two inputs as `multiply_tile` takes them where it has pairs, else the first alone. Codes are whole as bfloat16.
static inline factors join_pair(lanes one, lanes next) {
#if defined(IN_TURNS)
    return join(as_operand(one), as_operand(next));
#elif defined(IN_PAIRS)
    return (factors)(((ints)one >> 16 & 0xffff) | ((ints)next & -65536));
#else
    (void)next;
    return as_operand(one);
#endif
}

#ifdef IN_PAIRS
// Two vectors side by side become pairs of their numbers.
static const uint16_t paired __attribute__((vector_size(64))) = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#endif
static inline factors join_numbers(const C *one, const C *next) {  // the same of pages that hold T
#if defined(IN_TURNS)
    factors both;
    for (int q = 0; q < PARTS; q++) {
        typedef uint16_t narrow __attribute__((vector_size(2 * LANES / PARTS), aligned(2)));
        int_part low = __builtin_convertvector(((const narrow *)one)[q], int_part);
        int_part high = __builtin_convertvector(((const narrow *)next)[q], int_part);
        both.of[q] = low | high << 16;
    }
    return both;
#elif defined(IN_PAIRS)
    __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)one)),
                                      _mm256_loadu_si256((const __m256i *)next), 1);
    return _mm512_permutexvar_epi16((__m512i)paired, both);
#else
    (void)next;
    return as_operand(load_lanes((const T *)one));
#endif
}

static const T no_numbers[LANES];
static inline factors join_some(const C *one, const C *next) {  // NULL: zeros
    return join_numbers(one ? one : (const C *)no_numbers, next ? next : (const C *)no_numbers);
}

// Dimension d, and the next, of LANES keys; zeros behind the last dimension.
static inline factors load_keys(const C *at, long d, long dim, long size) {
    const int has_next = PAIR > 1 && d + 1 < dim;
    if (!SCALED) return join_some(at + d * size, has_next ? at + (d + 1) * size : NULL);
    return join_pair(key_lanes(at, d, size), has_next ? key_lanes(at, d + 1, size) : (lanes){});
}

// LANES dimensions from d on of a value, and of the next one. NULL: zeros.
static inline factors load_values(const C *one, const C *next, long d) {
    if (!SCALED) return join_some(one ? one + d : NULL, next ? next + d : NULL);
    return join_pair(one ? value_lanes(one, d) : (lanes){}, PAIR > 1 && next ? value_lanes(next, d) : (lanes){});
}

// The same of `count` dimensions, to memory.
static inline void store_few(T *to, int count, const C *one, const C *next, long d) {
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < PAIR; k++) {
            const C *from = k ? next : one;
            to[l * PAIR + k] = from && l < count ? store(value_one(from, d + l)) : 0;
        }
}

// The keys from `key` on as `panels` panels of keys, [dim / PAIR][panels][LANES][PAIR]; what is not read is zero, or anything.
static void take_keys(const Past *past, long key, int panels, T *to) {
    const long dim = past->pages->dim, size = past->pages->size, step = panels * PAIR * LANES;
    for (int p = 0; p < panels; p++, key += LANES, to += PAIR * LANES) {
        if (is_read(past, key) && key % size + LANES <= size) {
            const C *keys = key_block(past, key / size) + key % size;
            for (long d = 0; d < dim; d += PAIR) store_factors(to + d / PAIR * step, load_keys(keys, d, dim, size));
            continue;
        }
        for (int l = 0; l < LANES; l++) {  // blocks that are no multiple of LANES: key by key
            const C *one = is_read(past, key + l) ? key_block(past, (key + l) / size) + (key + l) % size : NULL;
            for (long d = 0; d < dim; d++) to[d / PAIR * step + l * PAIR + d % PAIR] = one ? store(key_one(one, d, size)) : 0;
            for (long d = dim; d % PAIR; d++) to[d / PAIR * step + l * PAIR + d % PAIR] = 0;
        }
    }
}

// Where `count` values from `key` on are; NULL where no row sees one, and behind the last.
static void find_values(const Past *past, long key, long count, const C **at) {
    const long size = past->pages->size, bytes = past->pages->dim / IN_BYTE;  // of a value, or numbers
    long block = key / size, offset = key % size;
    at[count] = NULL;
    for (long k = 0; k < count; block++, offset = 0) {
        long end = k + size - offset < count ? k + size - offset : count;
        const C *value = block >= 0 && key + k < past->last ? value_block(past, block) + offset * bytes : NULL;
        if (is_seen(past, key + k) && is_seen(past, key + end - 1) && (key + k >= past->from || key + end <= past->sinks)) {
            for (; k < end; k++, value += bytes) at[k] = value;
        }
        for (; k < end; k++, value += bytes) at[k] = is_seen(past, key + k) ? value : NULL;
    }
}

// `count` values as `panels` panels of dimensions from `from` on, [count / PAIR][panels][LANES][PAIR].
static void take_values(const C *const *at, long count, long from, int panels, long dim, T *to) {
    const int is_whole = from + panels * LANES <= dim;
    for (long k = 0; k < count; k += PAIR, to += panels * PAIR * LANES) {
        const C *one = at[k], *next = at[k + 1];
        if (is_whole && one && next) {
            for (int p = 0; p < panels; p++) store_factors(to + p * PAIR * LANES, load_values(one, next, from + p * LANES));
            continue;
        }
        for (int p = 0; p < panels; p++) {
            long d = from + p * LANES;
            if (d + LANES <= dim) store_factors(to + p * PAIR * LANES, load_values(one, next, d));
            else store_few(to + p * PAIR * LANES, dim - d, one, next, d);
        }
    }
}

static inline void store_token(const Pages *p, long slot, const T *k, const T *v) {
    const long bytes = p->dim / IN_BYTE;  // of a vector, or numbers
    for (long h = 0; h < p->kv_heads; h++) {
        long block = (slot / p->size * p->kv_heads + h) * p->size, offset = slot % p->size;  // counted in vectors
        store_vector(k + h * p->dim, p->dim, p->keys + block * bytes + offset, p->size, p->key_scales + block + offset);
        store_vector(v + h * p->dim, p->dim, p->values + (block + offset) * bytes, 1, p->value_scales + block + offset);
    }
}
