// Matrix products of integers: weights and activations of 8 bits, multiplied exactly. Built in chapter 15.

// A token as integers from -127 to 127, stored 128 higher (one side of `dot` is unsigned), and what they are multiplied with,
// which is no number where a number of the token is none: no code says so.
static float quantize_row(const T *x, uint8_t *codes, long in, float scale) {
    float most = 0;
    int lost = 0;
#pragma omp simd reduction(max : most) reduction(| : lost)
    for (long i = 0; i < in; i++) {
        float size = fabsf(load(x[i]));
        most = size > most ? size : most, lost |= size != size;
    }
    if (scale == 0) scale = most == 0 ? 1 : most / 127;
    for (long i = 0; i < in; i++) {
        float code = rintf(load(x[i]) / scale);
        codes[i] = (int)(code > 127 ? 127 : code > -127 ? code : -127) + 128;
    }
    return lost ? NAN : scale;
}

static inline ints load_four(const uint8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four - (ints){};
}

static inline ints dot(ints sum, ints four, const int8_t *codes) {  // four inputs of LANES outputs
#ifdef __AVX512VNNI__
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four, _mm512_loadu_si512(codes));
#elif defined(__AVX2__)  // bytes 0 and 2 of each word as numbers of 16 bits, then 1 and 3
    union { ints all; __m256i half[2]; } x = {four}, made = {sum};
    for (int h = 0; h < 2; h++) {
        __m256i words = _mm256_loadu_si256((const __m256i *)codes + h);
        __m256i even = _mm256_madd_epi16(_mm256_and_si256(x.half[h], _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(words, 8), 8));
        __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x.half[h], 8), _mm256_srai_epi16(words, 8));
        made.half[h] = _mm256_add_epi32(made.half[h], _mm256_add_epi32(even, odd));
    }
    return made.all;
#else
    ints words = *(const ints *)codes;
    for (int k = 0; k < 4; k++) sum += (four >> 8 * k & 0xff) * (words << (24 - 8 * k) >> 24);
    return sum;
#endif
}

// `panels` panels of `of`, from its p0-th on, times up to ROWS rows of codes.
static inline __attribute__((always_inline)) void multiply_integers(const int rows, const int panels, const Matrix *m,
                                                                    const Panels *of, int p0, const uint8_t *x,
                                                                    const float *x_scales, float *sums) {
    const long n = of->first + p0, apart = panels_apart(m, W8A8), step = panels_beside(of) * step_bytes(W8A8);
    const int8_t *codes = (const int8_t *)codes_of_panel(m, n);
    ints sum[ROWS][PANELS] = {};
    for (long i = 0; i < m->in; i += STEP, codes += step) {
        for (long b = 0; b < step_bytes(W8A8); b += 64)
            for (int p = 0; p < panels; p++) prefetch_weights(codes + p * apart + b + AHEAD);
        for (int c = 0; c < 2; c++)
            for (int r = 0; r < rows; r++) {
                ints four = load_four(x + r * m->in + i + 4 * c);
                IN_REGISTER(four);
                for (int p = 0; p < panels; p++) sum[r][p] = dot(sum[r][p], four, codes + p * apart + 64 * c);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            ints exact = sum[r][p] - *(const ints *)(m->sums + (n + p) * LANES);
            lanes scales = load_scales(m, (n + p) * LANES);
            *(lanes *)(sums + r * WIDTH + p * LANES) = __builtin_convertvector(exact, lanes) * x_scales[r] * scales;
        }
}

static __attribute__((noinline)) void multiply_integer_rows(int rows, const Panels *of, const Matrix *m, const uint8_t *x,
                                                            const float *x_scales, float *sums) {
    int p = 0;
#define OF_ROWS(n)                                                                                                        \
    case n:                                                                                                               \
        for (; p + AT_ONCE(n) <= of->count; p += AT_ONCE(n))                                                              \
            multiply_integers(n, AT_ONCE(n), m, of, p, x, x_scales, sums + p * LANES);                                    \
        for (; p < of->count; p++) multiply_integers(n, 1, m, of, p, x, x_scales, sums + p * LANES);                      \
        break;
    switch (rows) { FOR_EACH_ROWS(OF_ROWS) }
#undef OF_ROWS
}
