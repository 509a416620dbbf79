// What few queries multiply with keys and values where they lie, without the detour over memory; and what is prefetched meanwhile.
// Built in chapter 14.

// What a thread is about to read: the blocks of a tile, the keys and then the values of each `span` of them, and then the same of
// its next tile. Blocks lie anywhere, so the CPU cannot predict them: they are prefetched AHEAD_IN_PAGES bytes before their turn.
typedef struct {
    const Past *now, *next;  // `next` may be NULL
    long at;                 // how many blocks of both have been prefetched
    long span;               // 0: all
} Coming;

#ifndef AHEAD_IN_PAGES
#define AHEAD_IN_PAGES 32768
#endif

static inline long blocks_of(const Past *past) {  // how many have keys that are read
    const long size = past->pages->size;
    return (past->last - 1) / size - past->first / size + 1;
}

// Block number `at` of those that are read; of `blocks` blocks each comes twice, with its keys and with its values.
static const C *block_to_read(const Past *past, long at, long blocks, long span) {
    long first = 0;
    if (span) {
        first = at / (2 * span) * span, at -= 2 * first;
        if (blocks - first < span) span = blocks - first;
    } else span = blocks;
    const long block = past->first / past->pages->size + first;
    return at < span ? key_block(past, block + at) : value_block(past, block + at - span);
}

// The next block to be prefetched, where its first head lies; NULL if there is none.
static const C *next_coming(Coming *coming) {
    const long own = blocks_of(coming->now), more = coming->next ? blocks_of(coming->next) : 0, at = coming->at;
    if (at >= 2 * (own + more)) return NULL;
    coming->at++;
    return at < 2 * own ? block_to_read(coming->now, at, own, coming->span)
                        : block_to_read(coming->next, at - 2 * own, more, coming->span);
}

// How many blocks are to be prefetched when `read` blocks of the tile have been read.
static inline long until_read(const Coming *coming, long read) {
    const Pages *p = coming->now->pages;
    return read + AHEAD_IN_PAGES / (p->dim / IN_BYTE * p->size * coming->now->heads * (long)sizeof(C)) + 1;
}

// Prefetch those that have not been.
static void read_ahead(Coming *coming, long read) {
    const Pages *p = coming->now->pages;
    const long count = p->dim / IN_BYTE * p->size * coming->now->heads, until = until_read(coming, read);
    while (coming->at < until) {
        const C *block = next_coming(coming);
        if (!block) return;
        for (long i = 0; i < count; i += 64 / (long)sizeof(C)) prefetch(block + i);
    }
}

// The next of them, if there is one, for `multiply_near` to prefetch in its `steps` steps: a full tile prefetches a line with each step,
// or two if it has all panels.
static inline Far read_on_the_way(Coming *coming, long until, int rows, long panels, long steps) {
    const Pages *p = coming->now->pages;
    const long bytes = p->dim / IN_BYTE * p->size * (long)sizeof(C), step = (bytes + 64 * steps - 1) / (64 * steps) * 64;
    const Far none = {(const char *)p->keys, 0};
    if (GROUP == 1 || rows < ROWS || panels == 1 || step > (panels == PANELS ? 128 : 64) || coming->at >= until) return none;
    const C *block = next_coming(coming);
    return block ? (Far){(const char *)block, step} : none;
}

// Dimension d + turn of LANES keys, or all of a pair at once; `dim` is even.
static inline operand keys_in_turn(const C *at, long d, int turn, long size) {
#ifdef IN_TURNS
    return SCALED ? as_operand(key_lanes(at, d + turn, size)) : load_operand((const T *)(at + (d + turn) * size));
#else
    (void)turn;
    if (!SCALED) return join_numbers(at + d * size, at + (d + PAIR - 1) * size);
    return join_pair(key_lanes(at, d, size), key_lanes(at, d + PAIR - 1, size));
#endif
}

// The same of LANES dimensions of a value and the next one. `known`: neither of them is NULL.
static inline operand values_in_turn(const C *one, const C *next, int turn, long d, const int known) {
#ifdef IN_TURNS
    if (turn) one = next;
    if (!known && !one) return (operand){};
    return SCALED ? as_operand(value_lanes(one, d)) : load_operand((const T *)(one + d));
#else
    (void)turn;
    if (!known) return load_values(one, next, d);
    return SCALED ? join_pair(value_lanes(one, d), value_lanes(next, d)) : join_numbers(one + d, next + d);
#endif
}

enum { IN_PART = 4 };  // panels that few queries meet at once, at most

// Scores of `panels` times LANES keys, which lie from at[panel] on. With each load a line of what lies from ahead[panel] on is
// prefetched: many at once would keep the CPU waiting.
static inline __attribute__((always_inline)) void score_in_place(const int rows, const int panels, const C *const *at, long size,
                                                                 const T *q, long dim, float *scores, long stride,
                                                                 const C *const *ahead) {
    accumulator sum[ROWS][IN_PART] = {};
    for (long d = 0; d < dim; d += PAIR)
        for (int turn = 0; turn < TURNS; turn++) {
            operand w[IN_PART];
            for (int p = 0; p < panels; p++) {
                w[p] = keys_in_turn(at[p], d, turn, size);
                if (turn == 0) prefetch(ahead[p] + d * LANES / IN_BYTE);
            }
            for (int r = 0; r < rows; r++) {
                broadcast one = load_broadcast(q + r * dim + d, turn);
                IN_REGISTER(one);
                for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], one, w[p]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(accumulator *)(scores + r * stride + p * LANES) = sum[r][p];
}

// And the weighted sums of values, their dimensions from `from` on. NULL: of no value.
static inline __attribute__((always_inline)) void add_in_place(const int rows, const int panels, const C *const *at, long count,
                                                               long from, const T *weights, long apart, float *sums, long stride,
                                                               int begins) {
    accumulator sum[ROWS][IN_PART];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = begins ? (accumulator){} : *(accumulator *)(sums + r * stride + p * LANES);
    for (long k = 0; k < count; k += PAIR)
        for (int turn = 0; turn < TURNS; turn++) {
            operand w[IN_PART];
            for (int p = 0; p < panels; p++) w[p] = values_in_turn(at[k], at[k + PAIR - 1], turn, from + p * LANES, 0);
            for (int r = 0; r < rows; r++) {
                broadcast one = load_broadcast(weights + r * apart + k, turn);
                IN_REGISTER(one);
                for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], one, w[p]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(accumulator *)(sums + r * stride + p * LANES) = sum[r][p];
}

// `call` for `n` rows and all panels, as many at a time as leave their sums in registers, as `some` of them from `p0` on.
#ifdef __AVX512F__
#define IN_PART_OF(rows) (rows <= 6 ? 4 : 3)
#else
#define IN_PART_OF(rows) AT_ONCE(rows)
#endif
#define IN_PARTS(n, call)                                   \
    case n: {                                               \
        enum { rows = n };                                  \
        int p0 = 0;                                         \
        {                                                   \
            enum { some = IN_PART_OF(n) };                  \
            for (; p0 + some <= panels; p0 += some) call;   \
        }                                                   \
        if (IN_PART_OF(n) > 2) {                            \
            enum { some = 2 };                              \
            for (; p0 + some <= panels; p0 += some) call;   \
        }                                                   \
        enum { some = 1 };                                  \
        for (; p0 < panels; p0++) call;                     \
        break;                                              \
    }

static __attribute__((noinline)) void score_few(int num_rows, int panels, const C *const *at, long size, const T *q, long dim,
                                                float *scores, long stride, const C *const *ahead) {
#define OF_ROWS(n) IN_PARTS(n, score_in_place(rows, some, at + p0, size, q, dim, scores + p0 * LANES, stride, ahead + p0))
    switch (num_rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}

static __attribute__((noinline)) void add_few(int num_rows, int panels, const C *const *at, long count, long from, const T *weights,
                                              long apart, float *sums, long stride, int begins) {
#define OF_ROWS(n) \
    IN_PARTS(n, add_in_place(rows, some, at, count, from + p0 * LANES, weights, apart, sums + p0 * LANES, stride, begins))
    switch (num_rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}

// The same of all values of some blocks, which are `bytes` apart, while the blocks `ahead` are prefetched.
static inline __attribute__((always_inline)) void add_blocks_in_place(const int rows, const int panels, const C *const *blocks,
                                                                      long count, long size, long bytes, long from, const T *weights,
                                                                      long apart, float *sums, long stride, int begins,
                                                                      const C *const *ahead) {
    accumulator sum[ROWS][IN_PART];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sum[r][p] = begins ? (accumulator){} : *(accumulator *)(sums + r * stride + p * LANES);
    for (long b = 0; b < count; b++, weights += size) {
        const C *value = blocks[b], *later = ahead[b] + from / IN_BYTE;
        for (long k = 0; k < size; k += PAIR, value += PAIR * bytes, later += PAIR * bytes) {
            for (int q = 0; q < PAIR; q++)
                for (int c = 0; c < panels * LANES / IN_BYTE; c += 64 / (int)sizeof(C)) prefetch(later + q * bytes + c);
            for (int turn = 0; turn < TURNS; turn++) {
                operand w[IN_PART];
                for (int p = 0; p < panels; p++) w[p] = values_in_turn(value, value + (PAIR - 1) * bytes, turn, from + p * LANES, 1);
                for (int r = 0; r < rows; r++) {
                    broadcast one = load_broadcast(weights + r * apart + k, turn);
                    IN_REGISTER(one);
                    for (int p = 0; p < panels; p++) sum[r][p] = multiply_add(sum[r][p], one, w[p]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) *(accumulator *)(sums + r * stride + p * LANES) = sum[r][p];
}

static __attribute__((noinline)) void add_blocks(int num_rows, const C *const *blocks, long count, long size, long dim, const T *weights,
                                                 long apart, float *sums, long stride, int begins, const C *const *ahead) {
    const long panels = dim / LANES, bytes = dim / IN_BYTE;
#define OF_ROWS(n)                                                                                                              \
    IN_PARTS(n, add_blocks_in_place(rows, some, blocks, count, size, bytes, p0 * LANES, weights, apart, sums + p0 * LANES, stride, \
                                    begins, ahead))
    switch (num_rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}
