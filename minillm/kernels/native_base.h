// What all the CPU's kernels share: the element type, vectors of floats, exp and log, memory that is kept. Built in chapter 14.
//
// T is float or (with -DBF16) bfloat16; all arithmetic is float32.

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Floats handled together; rows that share a pass over weights or keys, as many as leave their sums in registers.
#ifdef __AVX512F__
enum { LANES = 16, ROWS = 8 };
#else
enum { LANES = 16, ROWS = 6 };
#endif
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

// LANES floats are PARTS vectors of the CPU's own width. Where that is more than one, gcc 12 takes every operation on `lanes`
// through memory, so what is done often is written for parts.
#ifdef __AVX512F__
enum { PARTS = 1 };
#elif defined(__AVX__)
enum { PARTS = 2 };
#else
enum { PARTS = 4 };
#endif
enum { WIDE = LANES / PARTS };
typedef float part __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef int32_t int_part __attribute__((vector_size(4 * WIDE), aligned(4)));

// Threads that share a product wait for the last of them. Where another process takes its core, that is milliseconds for a product
// of microseconds. A team of n that spends more than 1/n of its time so is faster with one thread less: where such waits, less than
// 20 ms apart, take 1/(n + 1) (shorter ones are not counted) and 10 ms in all, it is one smaller for a while, and then tries again.
// The limit is a number of threads, not of those left out: it holds too where torch has been told to use no more than the team.
#include <time.h>
enum { MILLISECOND = 1000000 };
static struct { long first_wait, last_wait, waited, until, pause; int limit; } team;  // shared by all; a lost update does no harm

static inline long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

int team_size(void) {
    int most = omp_get_max_threads();
    if (team.limit && now() >= team.until) team.limit = 0;
    return team.limit && team.limit < most ? team.limit : most;
}

// `worked`: how long the first thread of a team had to do; `waited`: how long then for the others, whose shares were the same.
static inline void note_wait(long worked, long waited) {
    if (waited < MILLISECOND / 2 || waited < 2 * worked) return;
    long time = now();
    if (time - waited - team.last_wait > 20 * MILLISECOND || time - team.first_wait > 200 * MILLISECOND) {
        team.first_wait = time, team.waited = 0;
    } else {
        int size = team_size();
        team.waited += waited;
        if (team.waited > 10 * MILLISECOND && team.waited * (size + 1) > time - team.first_wait) {
            team.limit = size > 1 ? size - 1 : 1;
            team.pause = time - team.until > 500 * MILLISECOND ? 50 * MILLISECOND : 2 * team.pause;  // a while ago, or just tried again
            if (team.pause > 1000 * MILLISECOND) team.pause = 1000 * MILLISECOND;
            team.until = time + team.pause;
            team.first_wait = time, team.waited = 0;
        }
    }
    team.last_wait = time;
}

// Compiled with -DTIMED (minillm/bench/compare/phases.py) the first thread of a team adds up what its phases take, with the waits at
// their end. SPAN: the rest of the block is that phase. What lies between the products of a chunk of tokens counts as products.
#ifdef TIMED
enum { PRODUCTS, ATTENTION, SAMPLING, PHASES };
static long spent[PHASES];  // nanoseconds
typedef struct { int phase; long begun; } Span;
static inline void end_span(Span *span) { if (span->begun) spent[span->phase] += now() - span->begun; }
#define SPAN(phase) Span span_ __attribute__((cleanup(end_span))) = {phase, omp_get_thread_num() == 0 ? now() : 0}
void take_spent(long *to) {
    memcpy(to, spent, sizeof spent);
    memset(spent, 0, sizeof spent);
}
#else
#define SPAN(phase)
#endif

#define PARALLEL_FROM 8192  // elements; waking a thread takes as long as handling some thousand

typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

#ifdef __AVX__
#include <immintrin.h>
#endif

// Narrow whole numbers as wide ones. gcc 12 takes bytes apart one by one where one instruction does it.
#ifdef __AVX512F__
static inline ints widen_bytes(const int8_t *p) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static inline ints widen_halves(const uint16_t *p) { return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
#else
typedef int8_t bytes8 __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
static inline ints widen_bytes(const int8_t *p) {
    return __builtin_convertvector(__builtin_convertvector(*(const bytes8 *)p, shorts), ints);
}
static inline ints widen_halves(const uint16_t *p) { return __builtin_convertvector(*(const halves *)p, ints); }
#endif

#ifdef BF16
typedef uint16_t T;

static inline float load(T x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

static inline T store(float x) {  // to the nearest, ties to even
    union { float value; uint32_t bits; } u = {x};
    return (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}

static inline lanes load_lanes(const T *p) {
    return (lanes)(widen_halves(p) << 16);
}

static inline void store_lanes(T *p, lanes x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    ints bits = (ints)x;
    *(halves *)p = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, halves);
#endif
}

#ifdef __AVX512F__
static inline part load_part(const T *p) { return load_lanes(p); }
static inline void store_part(T *p, part x) { store_lanes(p, x); }
#else
typedef uint16_t half_part __attribute__((vector_size(2 * WIDE), aligned(2)));
typedef int32_t wide_part __attribute__((vector_size(4 * WIDE)));
static inline part load_part(const T *p) { return (part)(__builtin_convertvector(*(const half_part *)p, wide_part) << 16); }
static inline void store_part(T *p, part x) {
    wide_part bits = (wide_part)x;
    *(half_part *)p = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, half_part);
}
#endif
#else
typedef float T;
static inline float load(T x) { return x; }
static inline T store(float x) { return x; }
static inline lanes load_lanes(const T *p) { return *(const lanes *)p; }
static inline void store_lanes(T *p, lanes x) { *(lanes *)p = x; }
static inline part load_part(const T *p) { return *(const part *)p; }
static inline void store_part(T *p, part x) { *(part *)p = x; }
#endif

static inline void widen(const T *x, long count, float *to) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) *(lanes *)(to + i) = load_lanes(x + i);
    for (; i < count; i++) to[i] = load(x[i]);
}

// exp(x) = 2^n * exp(r) with |r| <= ln(2)/2; relative error 1e-7. Below -87 it is 0 but for rounding, above 88 it is capped.
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    union { float value; int32_t bits; } shifted = {n};
    n -= 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, so that nothing is lost
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (1.6666667e-1f + r * (4.1666668e-2f + r * (8.3333310e-3f + r * 1.3888889e-3f)))));
    union { int32_t bits; float value; } power = {(int32_t)((uint32_t)(shifted.bits - 0x4b400000 + 127) << 23)};
    return p * power.value;
}

static inline lanes either(ints which, lanes yes, lanes no) { return (lanes)((which & (ints)yes) | (~which & (ints)no)); }

static inline lanes larger(lanes x, lanes y) {
#ifdef __AVX512F__
    return (lanes)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return either(x > y, x, y);
#endif
}

static inline part either_part(int_part which, part yes, part no) {
    return (part)((which & (int_part)yes) | (~which & (int_part)no));
}

static inline part larger_part(part x, part y) {
#ifdef __AVX512F__
    return larger(x, y);
#elif defined(__AVX__)
    return (part)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return either_part(x > y, x, y);
#endif
}

// x * y + z, rounded once where the CPU can: compilers choose anew wherever they meet the formula.
static inline lanes fused(lanes x, lanes y, lanes z) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__) && defined(__FMA__)
    union { lanes all; __m256 half[2]; } a = {x}, b = {y}, c = {z};
    for (int h = 0; h < 2; h++) c.half[h] = _mm256_fmadd_ps(a.half[h], b.half[h], c.half[h]);
    return c.all;
#elif defined(__FP_FAST_FMAF)
    lanes made;
    for (int l = 0; l < LANES; l++) made[l] = __builtin_fmaf(x[l], y[l], z[l]);
    return made;
#else
    return x * y + z;
#endif
}

// exp(x) for x up to 88, and 0 below -87: exp is subnormal soon after, and many CPUs multiply subnormal numbers slowly. Of
// up to AT_A_STEP parts at once: each line waits for the one before, so the CPU has others to compute meanwhile.
enum { AT_A_STEP = 4 };
static inline __attribute__((always_inline)) void exp_parts(part *of, const int count) {
    part n[AT_A_STEP], x[AT_A_STEP], p[AT_A_STEP];
    int_part kept[AT_A_STEP];
    const part low = -87.0f - (part){};
#define EACH for (int i = 0; i < count; i++)
    EACH kept[i] = ~(of[i] < low), x[i] = larger_part(low, of[i]);  // NaN stays NaN; far below, what is left of x would be noise
#ifdef __AVX512F__
    EACH n[i] = (part)_mm512_roundscale_ps((__m512)(x[i] * 1.44269504f), 0);
#else
    const part high = 88.0f - (part){};
    part shifted[AT_A_STEP];
    EACH x[i] = either_part(x[i] > high, high, x[i]);
    EACH shifted[i] = x[i] * 1.44269504f + 12582912.0f, n[i] = shifted[i] - 12582912.0f;
#endif
    EACH x[i] = x[i] - n[i] * 0.693359375f + n[i] * 2.12194440e-4f;
    EACH p[i] = 8.3333310e-3f + x[i] * 1.3888889e-3f;
    EACH p[i] = 4.1666668e-2f + x[i] * p[i];
    EACH p[i] = 1.6666667e-1f + x[i] * p[i];
    EACH p[i] = 0.5f + x[i] * p[i];
    EACH p[i] = 1.0f + x[i] * p[i];
    EACH p[i] = 1.0f + x[i] * p[i];
#ifdef __AVX512F__
    EACH of[i] = (part)(kept[i] & (int_part)_mm512_scalef_ps((__m512)p[i], (__m512)n[i]));
#else
    EACH of[i] = (part)(kept[i] & (int_part)(p[i] * (part)(((int_part)shifted[i] - 0x4b400000 + 127) << 23)));
#endif
#undef EACH
}

static inline part exp_part(part x) {
    exp_parts(&x, 1);
    return x;
}

static inline lanes exp_lanes(lanes x) {
    part parts[PARTS];
    memcpy(parts, &x, sizeof x);
    exp_parts(parts, PARTS);
    memcpy(&x, parts, sizeof x);
    return x;
}

static inline float sum_lanes(lanes x) {
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += x[l];
    return sum;
}

// log(x) for normal x > 0: x = m * 2^e with m in [0.75, 1.5), then the series of 2 artanh((m - 1) / (m + 1)).
static inline float fast_log(float x) {
    union { float value; int32_t bits; } u = {x};
    int32_t e = (u.bits - 0x3f400000) >> 23;
    u.bits -= (int32_t)((uint32_t)e << 23);
    float s = (u.value - 1.0f) / (u.value + 1.0f), s2 = s * s;
    float series = 2.0f + s2 * (0.66666667f + s2 * (0.4f + s2 * (0.28571429f + s2 * (0.22222222f + s2 * 0.18181818f))));
    return (float)e * 0.69314718f + s * series;
}

typedef struct { void *memory; size_t bytes; } Workspace;  // kept from call to call, one for each thread

static void *reserve(Workspace *workspace, size_t bytes) {
    if (bytes > workspace->bytes || !workspace->memory) {  // NULL means that memory ran out, also of no bytes
        free(workspace->memory);
        workspace->memory = malloc(bytes ? bytes : 1);
        workspace->bytes = workspace->memory ? bytes : 0;
    }
    return workspace->memory;
}
