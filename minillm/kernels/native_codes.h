// Low-bit weights in memory, how codes become numbers in registers, and how a group's sum is
// scaled. Built in chapter 15. `minillm/kernels/native_quant.py` packs.
//
//     w = scale * (value of the code - zero)        scale and zero belong to a group of inputs of one output
//
// A span of a group is summed unscaled, and then adds scale * (sum of x * value - zero * sum of x). As in native_linear.h, a panel
// holds LANES outputs, and GROUP of them are a group; codes lie in steps of STEP inputs, [in / STEP][GROUP][one of these]:
//
//     NIBBLES        codes of up to 4 bits (int2, int3, int4, fp4): a word of 32 bits for each output
//
//                      bits    31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
//                      input      7      5      3      1   |    6      4     2      0
//
//                    Shifted right by 4k, both halves of a word begin with a code, those of the inputs 2k and 2k + 1: the
//                    pair that one multiplication of bfloat16 takes.
//     BYTES, FLOATS  integers of up to 8 bits, e4m3 numbers: a byte for each code, [STEP][LANES], or as `decode` draws
//     W8A8           bytes, four inputs of an output side by side: [STEP / 4][LANES][4]

#if defined(__AVX2__) && !defined(__AVX512F__)
#define UNROLL_CODES _Pragma("GCC unroll 4")  // a step's codes are looked up together
#else
#define UNROLL_CODES _Pragma("GCC unroll 1")
#endif
enum {
    STEP = 8,
    SPAN = 256,  // inputs that are summed before they are scaled: a group, or what of a longer one fits the nearest cache decoded
};
enum { NUMBERS, NIBBLES, BYTES, FLOATS, W8A8 };

typedef struct {          // see `native.Matrix`
    const void *codes;    // of NUMBERS the groups of native_linear.h
    const void *scales;   // [panels][groups of inputs][LANES], float or half
    const int8_t *zeros;  // the same, or NULL
    const void *table;    // where `decode` looks values up: of NIBBLES as floats, then as bytes; bfloat16 IN_PAIRS
    const int32_t *sums;  // W8A8: 128 times the sum of an output's codes, [panels][LANES]
    long kind, in, out, group, half_scales;  // `in` and `group` in whole steps; `in` of NUMBERS in whole pairs
    float activation_scale;                  // W8A8: of all tokens; 0 where each has its own
} Matrix;

static _Thread_local Workspace for_rows;

static inline long step_bytes(const int kind) { return kind == NIBBLES ? 64 : 128; }

enum { CODE_PAIR = PAIR / TURNS };

static inline int_part widen_some(const int8_t *bytes) {
#ifdef __AVX512F__
    return widen_bytes(bytes);
#elif defined(__AVX2__)
    return (int_part)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#else
    int_part wide;
    for (int l = 0; l < LANES / PARTS; l++) wide[l] = bytes[l];
    return wide;
#endif
}

#ifndef IN_PAIRS
#ifdef __AVX512F__
typedef lanes some;
typedef ints some_ints;
#else
typedef part some;
typedef int_part some_ints;
#endif
static inline some value_of_bytes(const int kind, some_ints byte) {
    // The bits of an e4m3 number, moved to where a float has them: 2^120 times too small, for the exponents differ.
    some small = (some)(((byte & 0x7f) << 20) | (byte & INT32_MIN));
    return kind == FLOATS ? small * 0x1p120f : __builtin_convertvector(byte, some);
}
#endif

// Factors c and c + 1 of a step, for `multiply_add`.
#ifdef IN_PAIRS
static inline void decode(const int kind, const uint8_t *codes, int c, const uint8_t *table, operand *w) {
    if (kind == NIBBLES) {
        // A look-up takes 5 bits of each half word. The fifth belongs to the next code, so the table lies there twice.
        __m512i words = _mm512_loadu_si512(codes), values = _mm512_loadu_si512(table);
        for (int k = 0; k < 2; k++) w[k] = _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * (c + k)), values);
    } else {
        // 64 codes of 8 bits, each a sign and a magnitude, become 64 values of bfloat16. `table` holds the lower byte of what
        // each of 128 magnitudes means, then the upper ones, then the upper byte of -128: its code is 0x80, for nobody needs
        // -0. Interleaved, lower and upper bytes are values. They come out where they belong if four inputs lie so:
        //
        //     output  0   0   1   1   2   2   3   3 | 0   0   1   1   2   2   3   3 | 4   4  ..
        //     input   0   1   0   1   0   1   0   1 | 2   3   2   3   2   3   2   3 | 0   1  ..
        __m512i code = _mm512_loadu_si512(codes + 32 * c), sign = _mm512_set1_epi8(-128);
        __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), code, _mm512_loadu_si512(table + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), code, _mm512_loadu_si512(table + 192));
        high = _mm512_ternarylogic_epi32(high, code, sign, 0xf8);  // high | (code & sign)
        high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(code, sign), _mm512_set1_epi8(table[256]));
        w[0] = _mm512_unpacklo_epi8(low, high);
        w[1] = _mm512_unpackhi_epi8(low, high);
    }
}
#elif defined(__AVX512F__)
static inline void decode(const int kind, const uint8_t *codes, int c, const uint8_t *table, operand *w) {
    for (int k = 0; k < 2; k++) {
        ints index = *(const ints *)codes >> (2 * c + 16 * k);
        if (kind == NIBBLES) w[k] = (lanes)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));  // takes 4 bits of each
        else w[k] = value_of_bytes(kind, widen_bytes((const int8_t *)codes + (c + k) * LANES));
    }
}
#else  // part by part, as native_linear.h does
#ifdef __AVX2__
// The code of input c + k in the words of 8 outputs, as floats. One look-up makes bytes of half of their codes: of inputs 0, 1, 4, 5 or
// 2, 3, 6, 7. The compiler keeps them for the next inputs.
static inline part value_of_nibble(const uint8_t *words, int c, int k, const uint8_t *table) {
    __m256i codes = _mm256_loadu_si256((const __m256i *)words);
    __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(table + 4 * 16)));
    if (c & 2) codes = _mm256_srli_epi16(codes, 4);
    values = _mm256_shuffle_epi8(values, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    return (part)_mm256_cvtepi32_ps((__m256i)((int_part)values << (24 - 2 * (c & 4) - 16 * k) >> 24));
}
#else
static inline part value_of_nibble(const uint8_t *words, int c, int k, const uint8_t *table) {
    int_part index = *(const int_part *)words >> (2 * c + 16 * k);
    part values;
    for (int l = 0; l < LANES / PARTS; l++) values[l] = ((const float *)table)[index[l] & 15];
    return values;
}
#endif

static inline void decode(const int kind, const uint8_t *codes, int c, const uint8_t *table, operand *w) {
    for (int k = 0; k < 2; k++)
        for (int q = 0; q < PARTS; q++) {
            long first = q * LANES / PARTS;
            if (kind == NIBBLES) w[k].of[q] = value_of_nibble(codes + 4 * first, c, k, table);
            else w[k].of[q] = value_of_bytes(kind, widen_some((const int8_t *)codes + (c + k) * LANES + first));
        }
}
#endif

// What factor c + k is multiplied with.
static inline broadcast input_of_code(const T *x, int c, int k) {
    return TURNS > 1 ? load_broadcast(x + c, k) : load_broadcast(x + (c + k) * PAIR, 0);
}

// Two decoded factors as native_linear.h has weights, `step` numbers from one input to the next.
static inline void store_two(T *values, const operand *w, long step) {
#ifdef IN_TURNS
    (void)step, store_factors(values, join(w[0], w[1]));
#else
    for (int k = 0; k < 2; k++) store_factors(values + k * PAIR * step, w[k]);
#endif
}

// Where the codes of panel n begin, one of a group.
static inline const uint8_t *codes_of_panel(const Matrix *m, long n) {
    return (const uint8_t *)m->codes + (n / GROUP * GROUP * (m->in / STEP) + n % GROUP) * step_bytes(m->kind);
}

// From the codes of a panel to those of the next one, at the same inputs.
static inline long panels_apart(const Matrix *m, const int kind) { return (GROUP > 1 ? 1 : m->in / STEP) * step_bytes(kind); }

static inline part some_scales(const Matrix *m, long place) {
    if (!m->half_scales) return *(const part *)((const float *)m->scales + place);
    const uint16_t *halves = (const uint16_t *)m->scales + place;
#if defined(__AVX512F__)
    return (part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
#elif defined(__F16C__)
    return (part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
#else
    int_part half;
    for (int l = 0; l < WIDE; l++) half[l] = halves[l];
    part magnitude = (part)((half & 0x7fff) << 13) * 0x1p112f;  // the same trick
    return (part)((int_part)magnitude | (half & 0x8000) << 16);
#endif
}

static inline lanes load_scales(const Matrix *m, long place) {
    lanes scales;
    for (int q = 0; q < PARTS; q++) {
        part some = some_scales(m, place + q * WIDE);
        memcpy((char *)&scales + q * sizeof some, &some, sizeof some);
    }
    return scales;
}

// What a span of inputs adds to the sums of a panel: scale * (sum - zero * sum of x).
typedef struct { part scale[PARTS], zero[PARTS]; } Side;

static inline long side_place(const Matrix *m, long n, long i) {
    return (n * ((m->in + m->group - 1) / m->group) + i / m->group) * LANES;
}

static inline part some_zeros(const Matrix *m, long place) {
    return m->zeros ? __builtin_convertvector(widen_some(m->zeros + place), part) : (part){};
}

// How a span's sum adds to a panel's total.
#ifdef __AVX512F__  // without loops over the one part: gcc 12 would not unroll the loops around them, and take sums through memory
static inline Side side_of(const Matrix *m, long n, long i) {
    long place = side_place(m, n, i);
    return (Side){{some_scales(m, place)}, {some_zeros(m, place)}};
}

typedef lanes Total;
static inline Total add_span(Total total, accumulator sum, const Matrix *m, const Side *side, float x_sum) {
    lanes one = as_lanes(sum);
    if (m->zeros) one = fused(side->zero[0], -x_sum - (lanes){}, one);
    return fused(side->scale[0], one, total);
}
#else
static inline Side side_of(const Matrix *m, long n, long i) {
    long place = side_place(m, n, i);
    Side side;
    for (int q = 0; q < PARTS; q++, place += WIDE) side.scale[q] = some_scales(m, place), side.zero[q] = some_zeros(m, place);
    return side;
}

static inline part fused_part(part x, part y, part z) {
#if defined(__AVX2__) && defined(__FMA__)
    return (part)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__FP_FAST_FMAF)
    for (int l = 0; l < WIDE; l++) z[l] = __builtin_fmaf(x[l], y[l], z[l]);
    return z;
#else
    return x * y + z;
#endif
}

typedef accumulator Total;
static inline Total add_span(Total total, accumulator sum, const Matrix *m, const Side *side, float x_sum) {
    for (int q = 0; q < PARTS; q++) {
        part one = sum.of[q];
        if (m->zeros) one = fused_part(side->zero[q], -x_sum - (part){}, one);
        total.of[q] = fused_part(side->scale[q], one, total.of[q]);
    }
    return total;
}
#endif
