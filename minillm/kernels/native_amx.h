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
// one or two rows of codes (native_quant.h) and few queries (native_few.h), which do without the unit, add in its order. Their
// results may differ from the unit's only where all numbers of a sum are subnormal: the unit takes those for 0.
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

// Registers 0 to 2 hold sums, 3 holds x, 4 to 6 hold panels.
static inline void set_tile_rows(int rows) {
    if (tile_rows_set == rows) return;
    TileShapes shapes = {.palette = 1};
    for (int n = 0; n < 7; n++) shapes.bytes[n] = 64, shapes.rows[n] = n < 4 ? rows : TILE_ROWS;
    WRITTEN();
    _tile_loadconfig(&shapes);
    tile_rows_set = rows;
}

// The unit's order in vector instructions: the sums of a tile's even and odd inputs.
typedef struct { lanes even, odd; } Halves;

// Around products of a thread: telling the unit its shapes takes as long as 10 instructions of it.
static inline void begin_tiles(void) { tile_rows_set = 0; }

static inline void end_tiles(void) {
    if (tile_rows_set) _tile_release();
    tile_rows_set = 0;
}

// Sums of up to TILE_ROWS rows with 1 to 3 panels that lie side by side; see `multiply_tile`. `step` in numbers, from one pair of
// inputs to the next.
static inline __attribute__((always_inline)) void multiply_in_unit(const int panels, const T *x, long x_stride, const T *weights,
                                                                   long step, long in, int rows, float *sums, long sums_stride,
                                                                   int begins, long ahead) {
    const long apart = PAIR * LANES, x_bytes = x_stride * sizeof(T), sum_bytes = sums_stride * sizeof(float);
    long step_bytes = step * sizeof(T);
    WRITTEN();
    if (begins) {
        _tile_zero(0);
        if (panels > 1) _tile_zero(1);
        if (panels > 2) _tile_zero(2);
    } else {
        _tile_loadd(0, sums, sum_bytes);
        if (panels > 1) _tile_loadd(1, sums + LANES, sum_bytes);
        if (panels > 2) _tile_loadd(2, sums + 2 * LANES, sum_bytes);
    }
    long i = 0;
    for (; i + TILE_INPUTS <= in; i += TILE_INPUTS) {
        const T *here = weights + i / PAIR * step;
        if (ahead)
            for (long b = 0; b < TILE_ROWS * step_bytes; b += 64) prefetch((const char *)here + b + ahead);
        _tile_loadd(3, x + i, x_bytes);
        _tile_loadd(4, here, step_bytes);
        _tile_dpbf16ps(0, 3, 4);
        if (panels > 1) {
            _tile_loadd(5, here + apart, step_bytes);
            _tile_dpbf16ps(1, 3, 5);
        }
        if (panels > 2) {
            _tile_loadd(6, here + 2 * apart, step_bytes);
            _tile_dpbf16ps(2, 3, 6);
        }
    }
    if (i < in) {  // the last inputs, with zeros behind them
        T last[TILE_ROWS][TILE_INPUTS] = {}, panel[3][TILE_ROWS][PAIR * LANES] = {};
        for (int r = 0; r < rows; r++) memcpy(last[r], x + r * x_stride + i, (in - i) * sizeof(T));
        for (int p = 0; p < panels; p++)
            for (long k = 0; i + k < in; k += PAIR) memcpy(panel[p][k / PAIR], weights + (i + k) / PAIR * step + p * apart, 64);
        WRITTEN();
        _tile_loadd(3, last, 64);
        _tile_loadd(4, panel[0], 64);
        _tile_dpbf16ps(0, 3, 4);
        if (panels > 1) {
            _tile_loadd(5, panel[1], 64);
            _tile_dpbf16ps(1, 3, 5);
        }
        if (panels > 2) {
            _tile_loadd(6, panel[2], 64);
            _tile_dpbf16ps(2, 3, 6);
        }
    }
    _tile_stored(0, sums, sum_bytes);
    if (panels > 1) _tile_stored(1, sums + LANES, sum_bytes);
    if (panels > 2) _tile_stored(2, sums + 2 * LANES, sum_bytes);
}

// The same for any number of rows and panels.
static __attribute__((noinline)) void multiply_tiles(long rows, int panels, const T *x, long x_stride, const T *weights, long step,
                                                     long in, float *sums, long sums_stride, int begins, long ahead) {
    for (long row = 0; row < rows; row += TILE_ROWS, x += TILE_ROWS * x_stride, sums += TILE_ROWS * sums_stride) {
        int count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        set_tile_rows(count);
        long early = row == 0 ? ahead : 0;
        switch (panels) {
            case 1: multiply_in_unit(1, x, x_stride, weights, step, in, count, sums, sums_stride, begins, early); break;
            case 2: multiply_in_unit(2, x, x_stride, weights, step, in, count, sums, sums_stride, begins, early); break;
            default: multiply_in_unit(3, x, x_stride, weights, step, in, count, sums, sums_stride, begins, early);
        }
    }
}
#else
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif
