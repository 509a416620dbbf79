// Products of bfloat16 in the CPU's matrix unit (Intel's AMX, from Sapphire Rapids on). Built in chapter 14.
//
// A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 numbers with 32 rows of 16, 16,384 operations
// where a vector instruction has 64, and reads panels as native_linear.h lays them:
//
//         x, TILE_ROWS x TILE_INPUTS          a panel, 16 pairs of inputs x 16 outputs       sums, float32
//
//     row 0   x0  x1 | x2  x3 | .. x31        pair 0    w0 w1 of output 0 | of output 1 | ..     [16]
//     row 1                                   pair 1    w2 w3                                    [16]
//     ..                                      ..                                                 ..
//
// The instruction sums even and odd inputs of a tile apart, adds the two, and adds that to what was there: another order than
// that of `multiply_tile`. A row's result must not depend on its company, so numbers are multiplied here for one row, too, and
// one or two rows of codes (native_quant.h) and few queries (native_few.h), which do without the unit, add in its order. The unit
// takes subnormal numbers for 0: between `begin_tiles` and `end_tiles` vector instructions do so too.
#ifdef IN_TILES
enum { TILE_ROWS = 16, TILE_INPUTS = 32 };

typedef struct {  // what the unit is told about its eight registers
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
} TileShapes;

// gcc 12 does not know that loading a tile reads memory: before it, what was written has to be there.
#define WRITTEN() __asm__ volatile("" ::: "memory")

static _Thread_local int tile_rows_set;  // of sums and x; 0: unknown, since other libraries use the unit, too

// Registers 0 to 5 hold sums, 6 holds x, 7 a panel.
static inline void set_tile_rows(int rows) {
#define SHAPES(n) {.palette = 1, .bytes = {[0 ... 7] = 64}, .rows = {[0 ... 6] = n, [7] = TILE_ROWS}}
    static const TileShapes shapes[] = {SHAPES(1), SHAPES(2), SHAPES(3), SHAPES(4), SHAPES(5), SHAPES(6), SHAPES(7), SHAPES(8),
                                        SHAPES(9), SHAPES(10), SHAPES(11), SHAPES(12), SHAPES(13), SHAPES(14), SHAPES(15), SHAPES(16)};
#undef SHAPES
    if (tile_rows_set == rows) return;
    _tile_loadconfig(&shapes[rows - 1]);
    tile_rows_set = rows;
}

// The unit's order in vector instructions: the sums of a tile's even and odd inputs.
typedef struct { lanes even, odd; } Halves;

static _Thread_local unsigned control_before;  // of vector instructions

// Around products of a thread: telling the unit its shapes takes as long as 10 instructions of it. `flush`: whether subnormal
// operands and results of vector instructions are 0.
static inline void begin_tiles(int flush) {
    const unsigned results = 0x8000, operands = 0x40;
    tile_rows_set = 0;
    control_before = _mm_getcsr();
    if (flush) _mm_setcsr(control_before | results | operands);
}

static inline void end_tiles(void) {
    if (tile_rows_set) _tile_release();
    tile_rows_set = 0;
    _mm_setcsr(control_before);
}

// What TILE_INPUTS inputs add to the sums of one block of rows or two and of 1 to 3 panels, `apart` bytes from one to the next.
// In this order each load after the first serves a multiplication with what is in the other register. Panels are loaded past the
// nearest cache: that keeps x, which each group of panels meets again.
static inline __attribute__((always_inline)) void add_inputs(const int blocks, const int panels, const void *x, const void *below,
                                                             long x_bytes, const void *panel, long apart, long step) {
    const char *w = panel;
    _tile_loadd(6, x, x_bytes);
    _tile_stream_loadd(7, w, step);
    _tile_dpbf16ps(0, 6, 7);
    if (blocks == 1) {
        if (panels > 1) {
            _tile_stream_loadd(7, w + apart, step);
            _tile_dpbf16ps(1, 6, 7);
        }
        if (panels > 2) {
            _tile_stream_loadd(7, w + 2 * apart, step);
            _tile_dpbf16ps(2, 6, 7);
        }
        return;
    }
    _tile_loadd(6, below, x_bytes);
    _tile_dpbf16ps(3, 6, 7);
    if (panels > 1) {
        _tile_stream_loadd(7, w + apart, step);
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(6, x, x_bytes);
        _tile_dpbf16ps(1, 6, 7);
    }
    if (panels > 2) {
        _tile_stream_loadd(7, w + 2 * apart, step);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(6, below, x_bytes);
        _tile_dpbf16ps(5, 6, 7);
    }
}

// `call` with each register of sums, its row and its panel.
#define EACH_SUM(call)                                          \
    do {                                                        \
        call(0, 0, 0);                                          \
        if (panels > 1) call(1, 0, 1);                          \
        if (panels > 2) call(2, 0, 2);                          \
        if (blocks > 1) call(3, second, 0);                     \
        if (blocks > 1 && panels > 1) call(4, second, 1);       \
        if (blocks > 1 && panels > 2) call(5, second, 2);       \
    } while (0)
#define ZERO_SUM(n, row, panel) _tile_zero(n)
#define LOAD_SUM(n, row, panel) _tile_loadd(n, sums + (row) * sums_stride + (panel) * LANES, sums_stride * sizeof(float))
#define STORE_SUM(n, row, panel) _tile_stored(n, sums + (row) * sums_stride + (panel) * LANES, sums_stride * sizeof(float))

// Sums of up to `blocks` times TILE_ROWS rows with 1 to 3 panels that lie side by side; see `multiply_tile`. `step` in numbers,
// from one pair of inputs to the next. With each tile of inputs, so many lines are prefetched from `later` on. The second block
// ends with the last row; where rows are odd in number both blocks have the one in the middle, with the same sums.
static inline __attribute__((always_inline)) void multiply_in_unit(const int blocks, const int panels, const T *x, long x_stride,
                                                                   const T *weights, long step, long in, int rows, float *sums,
                                                                   long sums_stride, int begins, const char *later, long lines) {
    const long apart = PAIR * LANES, x_bytes = x_stride * sizeof(T), step_bytes = step * sizeof(T);
    const long second = blocks > 1 ? rows - tile_rows_set : 0;  // its first row
    const T *below = x + second * x_stride;
    WRITTEN();
    if (begins) EACH_SUM(ZERO_SUM);
    else EACH_SUM(LOAD_SUM);
    long i = 0;
    for (; i + TILE_INPUTS <= in; i += TILE_INPUTS) {
        for (long line = 0; line < lines; line++, later += 64)
            if (blocks > 1) __builtin_prefetch(later, 0, 2);  // not into the nearest cache, which would wait for memory
            else prefetch(later);
        add_inputs(blocks, panels, x + i, below + i, x_bytes, weights + i / PAIR * step, apart * sizeof(T), step_bytes);
    }
    if (i < in) {  // the last inputs, with zeros behind them
        T last[2 * TILE_ROWS][TILE_INPUTS] = {}, panel[3][TILE_ROWS][PAIR * LANES] = {};
        for (int r = 0; r < rows; r++) memcpy(last[r], x + r * x_stride + i, (in - i) * sizeof(T));
        for (int p = 0; p < panels; p++)
            for (long k = 0; i + k < in; k += PAIR) memcpy(panel[p][k / PAIR], weights + (i + k) / PAIR * step + p * apart, 64);
        WRITTEN();
        add_inputs(blocks, panels, last, last[second], sizeof last[0], panel, sizeof panel[0], sizeof panel[0][0]);
    }
    EACH_SUM(STORE_SUM);
}
#undef ZERO_SUM
#undef LOAD_SUM
#undef STORE_SUM
#undef EACH_SUM

// The same for any number of rows, in as few passes as there can be with as many rows in each, and for any number of panels. What
// lies `ahead` bytes behind the weights is prefetched, a part with each pass.
static __attribute__((noinline)) void multiply_tiles(long rows, int panels, const T *x, long x_stride, const T *weights, long step,
                                                     long in, float *sums, long sums_stride, int begins, long ahead) {
    const long passes = (rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), tile_lines = TILE_ROWS * step * sizeof(T) / 64;
    const long lines = ahead ? (tile_lines + passes - 1) / passes : 0;
    const char *later = (const char *)weights + ahead;
#define IN_UNIT_OF(blocks, n) \
    multiply_in_unit(blocks, n, x, x_stride, weights, step, in, count, sums, sums_stride, begins, later, lines)
    for (long left = passes, count; left > 0; left--, rows -= count, x += count * x_stride, sums += count * sums_stride) {
        count = (rows + left - 1) / left;
        set_tile_rows(count > TILE_ROWS ? (count + 1) / 2 : count);
        switch (count > TILE_ROWS ? panels + 3 : panels) {
            case 1: IN_UNIT_OF(1, 1); break;
            case 2: IN_UNIT_OF(1, 2); break;
            case 3: IN_UNIT_OF(1, 3); break;
            case 4: IN_UNIT_OF(2, 1); break;
            case 5: IN_UNIT_OF(2, 2); break;
            default: IN_UNIT_OF(2, 3);
        }
        later += in / TILE_INPUTS * lines * 64;
    }
#undef IN_UNIT_OF
}
#else
static inline void begin_tiles(int flush) { (void)flush; }
static inline void end_tiles(void) {}
#endif
