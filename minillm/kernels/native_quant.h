// Matrix products with weights in few bits: decoded in registers, on the way from memory to the multiplication. Built in
// chapter 15. `minillm/kernels/native_quant.py` packs and calls.
//
//     w = scale * (value of the code - zero)        scale and zero belong to a group of inputs of one output
//
// A group is summed unscaled, and then adds scale * (sum of x * value - zero * sum of x). As in native_linear.h, a panel
// holds LANES outputs; it lies in steps of STEP inputs, [panels][in / STEP][one of these]:
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

#ifdef __AVX512F__
enum { TOGETHER = ROWS };  // rows that share a pass over the codes, their sums in registers
#else
enum { TOGETHER = ROWS / 2 };
#endif
enum { STEP = 8, DECODE_FROM = 2 * ROWS + 1 };  // rows from which a panel is decoded first, and once
enum { NUMBERS, NIBBLES, BYTES, FLOATS, W8A8, DECODED };    // DECODED: values, as the panels of `linear`: [STEP / PAIR][LANES][PAIR]

typedef struct {          // see `native.Matrix`
    const void *codes;    // of NUMBERS the panels that `linear` takes
    const void *scales;   // [panels][groups][LANES], float or half
    const int8_t *zeros;  // [panels][groups][LANES], or NULL
    const void *table;    // where `decode` looks values up
    const int32_t *sums;  // W8A8: 128 times the sum of an output's codes, [panels][LANES]
    long kind, in, out, group, half_scales;  // `in` and `group` in whole steps; `in` of NUMBERS in whole pairs
    float activation_scale;                  // W8A8: of all tokens; 0 where each has its own
} Matrix;

static _Thread_local Workspace for_panel, for_row_sums, for_row_codes;

static inline long step_bytes(const int kind) { return kind == NIBBLES ? 64 : kind == DECODED ? STEP * LANES * sizeof(T) : 128; }

// Factors c and c + 1 of a step, for `multiply_add`.
#ifdef IN_PAIRS
static inline void decode(const int kind, const uint8_t *codes, int c, const uint8_t *table, factors *w) {
    if (kind == NIBBLES) {
        // A look-up takes 5 bits of each half word. The fifth belongs to the next code, so the table lies there twice.
        __m512i words = _mm512_loadu_si512(codes), values = _mm512_loadu_si512(table);
        for (int k = 0; k < 2; k++) w[k] = _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * (c + k)), values);
    } else if (kind == DECODED) {
        for (int k = 0; k < 2; k++) w[k] = _mm512_loadu_si512(codes + 64 * (c + k));
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
#else
#ifdef __AVX2__
#include <immintrin.h>
#endif

static inline lanes look_up(const float *table, ints index) {
#if defined(__AVX512F__)
    return (lanes)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));  // takes 4 bits of each index
#elif defined(__AVX2__)
    union { ints all; __m256i half[2]; } places = {index};
    union { __m256 half[2]; lanes all; } values;
    for (int h = 0; h < 2; h++) {  // takes 3 bits of each index; the fourth, as a sign, chooses the half of the table
        __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), places.half[h]);
        __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), places.half[h]);
        values.half[h] = _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(places.half[h], 28));
    }
    return values.all;
#else
    lanes values;
    for (int l = 0; l < LANES; l++) values[l] = table[index[l] & 15];
    return values;
#endif
}

static inline void decode(const int kind, const uint8_t *codes, int c, const uint8_t *table, factors *w) {
    for (int k = 0; k < 2; k++) {
        if (kind == NIBBLES) w[k] = look_up((const float *)table, *(const ints *)codes >> (2 * c + 16 * k));
        if (kind == DECODED) w[k] = load_factors((const T *)codes + (c + k) * LANES);
        if (kind == BYTES || kind == FLOATS) {
            ints byte = widen_bytes((const int8_t *)codes + (c + k) * LANES);
            // The bits of an e4m3 number, moved to where a float has them: 2^120 times too small, for the exponents differ.
            lanes small = (lanes)(((byte & 0x7f) << 20) | (byte & INT32_MIN));
            w[k] = kind == FLOATS ? small * 0x1p120f : __builtin_convertvector(byte, lanes);
        }
    }
}
#endif

static inline lanes load_scales(const Matrix *m, long place) {
    if (!m->half_scales) return *(const lanes *)((const float *)m->scales + place);
    ints half = widen_halves((const uint16_t *)m->scales + place);
    lanes magnitude = (lanes)((half & 0x7fff) << 13) * 0x1p112f;  // the same trick
    return (lanes)((ints)magnitude | (half & 0x8000) << 16);
}

static inline lanes load_zeros(const Matrix *m, long place) {
    return __builtin_convertvector(widen_bytes(m->zeros + place), lanes);
}

// Panel n times up to ROWS rows of x. The order of additions is the same for any number of rows and for a decoded panel, so
// that a row's result never depends on its company.
static inline __attribute__((always_inline)) void multiply_groups(const int rows, const int kind, const Matrix *m, long n,
                                                                  const uint8_t *codes, const T *x, const float *x_sums, lanes *sums) {
    long groups = (m->in + m->group - 1) / m->group;
    lanes total[ROWS] = {};
    for (long g = 0, i = 0; g < groups; g++) {
        long end = i + m->group < m->in ? i + m->group : m->in;
        accumulator sum[ROWS][2] = {};
        for (; i < end; i += STEP, codes += step_bytes(kind)) {
            for (long b = 0; b < step_bytes(kind) && kind != DECODED && rows >= FEW_ROWS; b += 64) ask_for(codes + b + AHEAD);
#pragma GCC unroll 1
            for (int c = 0; c < STEP / PAIR; c += 2) {
                factors w[2];
                decode(kind, codes, c, m->table, w);
                for (int r = 0; r < rows; r++)
                    for (int k = 0; k < 2; k++) sum[r][k] = multiply_add(sum[r][k], x + r * m->in + i + (c + k) * PAIR, w[k]);
            }
        }
        long place = (n * groups + g) * LANES;
        lanes scale = load_scales(m, place);
        for (int r = 0; r < rows; r++) {
            lanes of_group = (lanes)sum[r][0] + (lanes)sum[r][1];
            if (m->zeros) of_group -= load_zeros(m, place) * x_sums[r * groups + g];
            total[r] += scale * of_group;
        }
    }
    for (int r = 0; r < rows; r++) sums[r] = total[r];
}

static inline __attribute__((always_inline)) void multiply_rows(int rows, const int kind, const Matrix *m, long n,
                                                                const uint8_t *codes, const T *x, const float *x_sums, lanes *sums) {
    switch (rows) {
        case 1: multiply_groups(1, kind, m, n, codes, x, x_sums, sums); break;
        case 2: multiply_groups(2, kind, m, n, codes, x, x_sums, sums); break;
        case 3: multiply_groups(3, kind, m, n, codes, x, x_sums, sums); break;
#ifdef __AVX512F__
        case 4: multiply_groups(4, kind, m, n, codes, x, x_sums, sums); break;
        case 5: multiply_groups(5, kind, m, n, codes, x, x_sums, sums); break;
        case 6: multiply_groups(6, kind, m, n, codes, x, x_sums, sums); break;
        case 7: multiply_groups(7, kind, m, n, codes, x, x_sums, sums); break;
#endif
        default: multiply_groups(TOGETHER, kind, m, n, codes, x, x_sums, sums);
    }
}

static inline __attribute__((always_inline)) void decode_panel_of(const int kind, const Matrix *m, const uint8_t *codes, T *values) {
    for (long i = 0; i < m->in; i += STEP, codes += step_bytes(kind)) {
        for (long b = 0; b < step_bytes(kind); b += 64) ask_for(codes + b + AHEAD);
        for (int c = 0; c < STEP / PAIR; c += 2) {
            factors w[2];
            decode(kind, codes, c, m->table, w);
            for (int k = 0; k < 2; k++) store_factors(values + (i + (c + k) * PAIR) * LANES, w[k]);
        }
    }
}

static void decode_panel(const Matrix *m, const uint8_t *codes, T *values) {
    switch (m->kind) {
        case NIBBLES: decode_panel_of(NIBBLES, m, codes, values); break;
        case BYTES: decode_panel_of(BYTES, m, codes, values); break;
        default: decode_panel_of(FLOATS, m, codes, values);
    }
}

static const uint8_t *codes_of_panel(const Matrix *m, long n) {
    return (const uint8_t *)m->codes + n * m->in / STEP * step_bytes(m->kind);
}

// The sum of x over each group, [rows][groups].
static float *sum_groups(const Matrix *m, const T *x, long rows) {
    long groups = (m->in + m->group - 1) / m->group;
    float *sums = reserve(&for_row_sums, rows * groups * sizeof(float));
    if (!sums) return NULL;
#pragma omp parallel for if (rows * m->in > PARALLEL_FROM)
    for (long row = 0; row < rows; row++)
        for (long g = 0; g < groups; g++) {
            long end = (g + 1) * m->group < m->in ? (g + 1) * m->group : m->in;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long i = g * m->group; i < end; i++) sum += load(x[row * m->in + i]);
            sums[row * groups + g] = sum;
        }
    return sums;
}

static int multiply_codes(const Matrix *m, const T *x, const T *bias, const T *residual, T *out, long rows) {
    long num_panels = (m->out + LANES - 1) / LANES, groups = (m->in + m->group - 1) / m->group, failed = 0;
    const float *x_sums = m->zeros ? sum_groups(m, x, rows) : NULL;
    if (m->zeros && !x_sums) return 1;
#pragma omp parallel reduction(| : failed) if (rows * m->in * m->out > 65536)
    {
        T *values = rows < DECODE_FROM ? NULL : reserve(&for_panel, m->in * LANES * sizeof(T));
        failed = rows >= DECODE_FROM && !values;
#pragma omp for
        for (long n = 0; n < num_panels; n++) {
            const uint8_t *codes = codes_of_panel(m, n);
            if (failed) continue;
            if (values) decode_panel(m, codes, values);
            for (long row = 0; row < rows; row += TOGETHER) {
                lanes sums[ROWS];
                long count = rows - row < TOGETHER ? rows - row : TOGETHER;
                long again = values ? TOGETHER - count : 0;  // rows once more, so that there are always so many
                const T *first = x + (row - again) * m->in;
                const float *first_sums = x_sums ? x_sums + (row - again) * groups : NULL;
                switch (values ? DECODED : m->kind) {
                    case NIBBLES: multiply_rows(count, NIBBLES, m, n, codes, first, first_sums, sums); break;
                    case BYTES: multiply_rows(count, BYTES, m, n, codes, first, first_sums, sums); break;
#ifndef IN_PAIRS
                    case FLOATS: multiply_rows(count, FLOATS, m, n, codes, first, first_sums, sums); break;
#endif
                    default: multiply_groups(TOGETHER, DECODED, m, n, (const uint8_t *)values, first, first_sums, sums);
                }
                finish(sums + again, count, bias, residual, out, row, n * LANES, m->out);
            }
        }
    }
    return failed;
}

// A token as integers from -127 to 127, stored 128 higher (one side of `dot` is unsigned), and what they are multiplied with.
static float quantize_row(const T *x, uint8_t *codes, long in, float scale) {
    float most = 0;
#pragma omp simd reduction(max : most)
    for (long i = 0; i < in; i++) most = fabsf(load(x[i])) > most ? fabsf(load(x[i])) : most;
    if (scale == 0) scale = most == 0 ? 1 : most / 127;
    for (long i = 0; i < in; i++) {
        float code = rintf(load(x[i]) / scale);
        codes[i] = (int)(code > 127 ? 127 : code < -127 ? -127 : code) + 128;
    }
    return scale;
}

static inline ints dot(ints sum, const uint8_t *x, const int8_t *codes) {  // four inputs of LANES outputs
#ifdef __AVX512VNNI__
    int32_t four;
    memcpy(&four, x, 4);
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), _mm512_loadu_si512(codes));
#else
    ints words = *(const ints *)codes;
    for (int k = 0; k < 4; k++) sum += (int32_t)x[k] * (words << (24 - 8 * k) >> 24);
    return sum;
#endif
}

static inline __attribute__((always_inline)) void multiply_integers(const int rows, const Matrix *m, long n, const uint8_t *x,
                                                                    const float *x_scales, lanes *sums) {
    const int8_t *codes = (const int8_t *)codes_of_panel(m, n);
    ints sum[ROWS][2] = {};
    for (long i = 0; i < m->in; i += STEP, codes += step_bytes(W8A8))
        for (int c = 0; c < 2; c++)
            for (int r = 0; r < rows; r++) sum[r][c] = dot(sum[r][c], x + r * m->in + i + 4 * c, codes + 64 * c);
    for (int r = 0; r < rows; r++) {
        ints exact = sum[r][0] + sum[r][1] - *(const ints *)(m->sums + n * LANES);
        sums[r] = __builtin_convertvector(exact, lanes) * x_scales[r] * load_scales(m, n * LANES);
    }
}

static int multiply_w8a8(const Matrix *m, const T *x, const T *bias, const T *residual, T *out, long rows) {
    float *x_scales = reserve(&for_row_codes, rows * (sizeof(float) + m->in));
    if (!x_scales) return 1;
    uint8_t *codes = (uint8_t *)(x_scales + rows);
#pragma omp parallel if (rows * m->in * m->out > 65536)
    {
#pragma omp for
        for (long row = 0; row < rows; row++)
            x_scales[row] = quantize_row(x + row * m->in, codes + row * m->in, m->in, m->activation_scale);
#pragma omp for
        for (long n = 0; n < (m->out + LANES - 1) / LANES; n++)
            for (long row = 0; row < rows; row += ROWS) {
                lanes sums[ROWS];
                int count = rows - row < ROWS ? rows - row : ROWS;
                const uint8_t *first = codes + row * m->in;
                switch (count) {
                    case 1: multiply_integers(1, m, n, first, x_scales + row, sums); break;
                    case 2: multiply_integers(2, m, n, first, x_scales + row, sums); break;
                    case 3: multiply_integers(3, m, n, first, x_scales + row, sums); break;
                    case 4: multiply_integers(4, m, n, first, x_scales + row, sums); break;
                    case 5: multiply_integers(5, m, n, first, x_scales + row, sums); break;
                    case 6: multiply_integers(6, m, n, first, x_scales + row, sums); break;
                    case 7: multiply_integers(7, m, n, first, x_scales + row, sums); break;
                    default: multiply_integers(8, m, n, first, x_scales + row, sums);
                }
                finish(sums, count, bias, residual, out, row, n * LANES, m->out);
            }
    }
    return 0;
}

// out [rows, out] = x [rows, in] times any matrix, plus bias and plus residual [rows, out] if there are. Returns 1 if memory
// ran out.
int multiply(const Matrix *m, const T *x, const T *bias, const T *residual, T *out, long rows) {
    if (m->kind == W8A8) return multiply_w8a8(m, x, bias, residual, out, rows);
    if (m->kind != NUMBERS) return multiply_codes(m, x, bias, residual, out, rows);
    linear(x, m->codes, bias, residual, out, rows, m->out, m->in);
    return 0;
}

// out [count, in] = rows of the weight, by their numbers: an embedding that is the output matrix too. Returns 1 if memory
// ran out.
int unpack_rows(const Matrix *m, const int64_t *ids, T *out, long count) {
    long groups = (m->in + m->group - 1) / m->group;
    T *values = reserve(&for_panel, m->in * LANES * sizeof(T));
    if (!values) return 1;
    for (long k = 0; k < count; k++) {
        long n = ids[k] / LANES, lane = ids[k] % LANES;
        const uint8_t *codes = codes_of_panel(m, n);
        if (m->kind != W8A8) decode_panel(m, codes, values);
        for (long i = 0; i < m->in; i++) {
            long place = (n * groups + i / m->group) * LANES;
            float value = m->kind == W8A8 ? ((const int8_t *)codes)[(i / 4 * LANES + lane) * 4 + i % 4]
                                          : load(values[(i / PAIR * LANES + lane) * PAIR + i % PAIR]);
            if (m->zeros) value -= m->zeros[place + lane];
            out[k * m->in + i] = store(value * load_scales(m, place)[lane]);
        }
    }
    return 0;
}
