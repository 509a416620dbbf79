// What a CPU does between two matrix products, each in one pass over its data. Built in chapter 14.
//
// Compiled twice, for float and (with -DBF16) for bfloat16; all arithmetic is float32. `minillm/kernels/native.py`
// compiles, loads and calls it, and names the PyTorch twin of every function here.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, ROWS = 8 };  // floats handled together; query rows that share a pass over the keys
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

#define PARALLEL_FROM 32768  // elements; waking a thread takes as long as handling some ten thousand

#ifdef BF16
typedef uint16_t T;
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

static inline float load(T x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

static inline T store(float x) {  // to the nearest, ties to even
    union { float value; uint32_t bits; } u = {x};
    return (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}

static inline lanes load_lanes(const T *p) {
    return (lanes)(__builtin_convertvector(*(const halves *)p, ints) << 16);
}
#else
typedef float T;
static inline float load(T x) { return x; }
static inline T store(float x) { return x; }
static inline lanes load_lanes(const T *p) { return *(const lanes *)p; }
#endif

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

// log(x) for normal x > 0: x = m * 2^e with m in [0.75, 1.5), then the series of 2 artanh((m - 1) / (m + 1)).
static inline float fast_log(float x) {
    union { float value; int32_t bits; } u = {x};
    int32_t e = (u.bits - 0x3f400000) >> 23;
    u.bits -= (int32_t)((uint32_t)e << 23);
    float s = (u.value - 1.0f) / (u.value + 1.0f), s2 = s * s;
    float series = 2.0f + s2 * (0.66666667f + s2 * (0.4f + s2 * (0.28571429f + s2 * (0.22222222f + s2 * 0.18181818f))));
    return (float)e * 0.69314718f + s * series;
}

// Weights of a linear layer lie in panels of LANES outputs, [panels][in / PAIR][LANES][PAIR]: a panel is read once,
// from front to back, and every load brings one input's weight (of bfloat16 two inputs') for LANES outputs.
#if defined(BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
enum { PAIR = 2 };
typedef __m512 accumulator;
static inline accumulator multiply_add(accumulator sum, const T *x, const T *weights) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(weights));
}
#else
enum { PAIR = 1 };
typedef lanes accumulator;
static inline accumulator multiply_add(accumulator sum, const T *x, const T *weights) {
    return sum + load(*x) * load_lanes(weights);
}
#endif

int weight_pair(void) { return PAIR; }

// One panel times up to ROWS rows of x. Few rows take more chains of additions, so that none waits for the one before.
static inline __attribute__((always_inline)) void multiply_panel(const int rows, const int chains, const T *x, long x_stride,
                                                                 const T *panel, lanes *sums, long in) {
    accumulator sum[ROWS][4] = {};
    long i = 0, step = PAIR * chains;
    for (; i + step <= in; i += step)
        for (int c = 0; c < chains; c++)
            for (int r = 0; r < rows; r++)
                sum[r][c] = multiply_add(sum[r][c], x + r * x_stride + i + c * PAIR, panel + (i + c * PAIR) * LANES);
    for (; i < in; i += PAIR)
        for (int r = 0; r < rows; r++) sum[r][0] = multiply_add(sum[r][0], x + r * x_stride + i, panel + i * LANES);
    for (int r = 0; r < rows; r++) {
        sums[r] = (lanes)sum[r][0];
        for (int c = 1; c < chains; c++) sums[r] += (lanes)sum[r][c];
    }
}

// out [rows, out_features] = x [rows, in] times the weights, plus bias and plus residual [rows, out_features] if there are.
// `in` is a multiple of PAIR; residual may be out.
void linear(const T *x, const T *panels, const T *bias, const T *residual, T *out, long rows, long out_features, long in) {
    enum { CHUNK = 32 };  // rows that a panel meets while it is in the nearest cache
    long num_panels = (out_features + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) if (rows * in * out_features > 65536)
    for (long from = 0; from < rows; from += CHUNK)
        for (long n = 0; n < num_panels; n++) {
            const T *panel = panels + n * in * LANES;
            long to = from + CHUNK < rows ? from + CHUNK : rows;
            int width = out_features - n * LANES < LANES ? out_features - n * LANES : LANES;
            for (long row = from; row < to; row += ROWS) {
                const T *first = x + row * in;
                lanes sums[ROWS];
                int count = to - row < ROWS ? to - row : ROWS;
                switch (count) {
                    case 1: multiply_panel(1, 4, first, in, panel, sums, in); break;
                    case 2: multiply_panel(2, 4, first, in, panel, sums, in); break;
                    case 3: multiply_panel(3, 2, first, in, panel, sums, in); break;
                    case 4: multiply_panel(4, 2, first, in, panel, sums, in); break;
                    case 5: multiply_panel(5, 2, first, in, panel, sums, in); break;
                    case 6: multiply_panel(6, 2, first, in, panel, sums, in); break;
                    case 7: multiply_panel(7, 2, first, in, panel, sums, in); break;
                    default: multiply_panel(8, 2, first, in, panel, sums, in);
                }
                for (int r = 0; r < count; r++) {
                    long place = (row + r) * out_features + n * LANES;
                    if (bias)
                        for (int l = 0; l < width; l++) sums[r][l] += load(bias[n * LANES + l]);
                    if (residual)
                        for (int l = 0; l < width; l++) sums[r][l] = load(store(sums[r][l])) + load(residual[place + l]);
                    for (int l = 0; l < width; l++) out[place + l] = store(sums[r][l]);
                }
            }
        }
}

// out = x / sqrt(mean(x^2) + eps) * weight. Row i starts at x + i / inner * stride + i % inner * size, and likewise in out,
// which may be x.
void rms_norm(const T *x, const T *weight, T *out, long rows, long size, long inner, long stride, long out_stride, float eps) {
#pragma omp parallel for if (rows * size > PARALLEL_FROM)
    for (long i = 0; i < rows; i++) {
        const T *in = x + i / inner * stride + i % inner * size;
        T *to = out + i / inner * out_stride + i % inner * size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long j = 0; j < size; j++) sum += load(in[j]) * load(in[j]);
        float scale = 1.0f / sqrtf(sum / size + eps);
        for (long j = 0; j < size; j++) to[j] = store(load(store(load(in[j]) * scale)) * load(weight[j]));
    }
}

// out = silu(gate) * up, where a row of x holds gate and then up, `size` of each.
void silu_mul(const T *x, T *out, long rows, long size) {
#pragma omp parallel for if (rows * size > PARALLEL_FROM)
    for (long i = 0; i < rows; i++) {
        const T *gate = x + 2 * i * size, *up = gate + size;
        for (long j = 0; j < size; j++) {
            float g = load(gate[j]);
            out[i * size + j] = store(load(store(g / (1.0f + fast_exp(-g)))) * load(up[j]));
        }
    }
}

// cos and signed sin of position * frequency, each [tokens, dim].
void rotary_angles(const int64_t *positions, const float *frequencies, const float *sin_scale, float cos_scale, T *cosines,
                   T *sines, long tokens, long dim) {
#pragma omp parallel for if (tokens * dim > 4096)
    for (long i = 0; i < tokens; i++)
        for (long j = 0; j < dim / 2; j++) {  // the second half repeats the first, but for the sign of sin
            float angle = (float)positions[i] * frequencies[j], c = cosf(angle), s = sinf(angle);
            T *cosine = cosines + i * dim + j, *sine = sines + i * dim + j;
            cosine[0] = cosine[dim / 2] = store(c * cos_scale);
            sine[0] = store(s * sin_scale[j]);
            sine[dim / 2] = store(s * sin_scale[j + dim / 2]);
        }
}

// out[token, head] = x * cos + (x with its halves swapped) * sin; tokens of x lie `stride` apart.
void rotate(const T *x, const T *cosines, const T *sines, T *out, long tokens, long heads, long dim, long stride) {
    long half = dim / 2;
#pragma omp parallel for if (tokens * heads * dim > PARALLEL_FROM)
    for (long i = 0; i < tokens; i++)
        for (long h = 0; h < heads; h++) {
            const T *in = x + i * stride + h * dim, *c = cosines + i * dim, *s = sines + i * dim;
            T *to = out + (i * heads + h) * dim;
            for (long j = 0; j < half; j++) {
                float first = load(in[j]), second = load(in[j + half]);
                to[j] = store(first * load(c[j]) + second * load(s[j]));
                to[j + half] = store(second * load(c[j + half]) + first * load(s[j + half]));
            }
        }
}

static inline uint64_t random_bits(uint64_t key, uint64_t counter) {  // SplitMix64
    uint64_t bits = key + (counter + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

// Standard Gumbel noise [rows, count], float whatever T is: see minillm/sampling/noise.py.
void gumbel_noise(const int64_t *seeds, const int64_t *positions, const int64_t *token_ids, float *out, long rows, long count) {
#pragma omp parallel for collapse(2) if (rows * count > PARALLEL_FROM / 4)
    for (long i = 0; i < rows; i++)
        for (long from = 0; from < count; from += 4096) {
            uint64_t key = random_bits(seeds[i], positions[i]);
            long to = from + 4096 < count ? from + 4096 : count;
            for (long j = from; j < to; j++) {
                int64_t bits = (random_bits(key, token_ids[j]) & INT64_MAX) | 1;
                float u = (float)bits * 0x1p-63f;
                u = u > 1 - 0x1p-24f ? 1 - 0x1p-24f : u;
                // log1p(-u): what rounding took from 1 - u is put back by the factor.
                float rest = 1.0f - u, lost = 1.0f - rest;
                float exponential = lost == 0.0f ? u : -fast_log(rest) * (u / lost);
                out[i * count + j] = -fast_log(exponential);
            }
        }
}

// scores[row][key] of one block for up to ROWS queries. block is [dim][size]: keys lie transposed.
static inline __attribute__((always_inline)) void score_block(const int rows, const float *q, const T *block, float *scores,
                                                              long stride, long dim, long size) {
    long key = 0;
    for (; key + LANES <= size; key += LANES) {
        lanes sum[ROWS][2] = {};  // two chains of additions each, so that none waits for the one before
        long d = 0;
        for (; d + 2 <= dim; d += 2) {
            lanes even = load_lanes(block + d * size + key), odd = load_lanes(block + (d + 1) * size + key);
            for (int r = 0; r < rows; r++) {
                sum[r][0] += q[r * dim + d] * even;
                sum[r][1] += q[r * dim + d + 1] * odd;
            }
        }
        if (d < dim) {
            lanes last = load_lanes(block + d * size + key);
            for (int r = 0; r < rows; r++) sum[r][0] += q[r * dim + d] * last;
        }
        for (int r = 0; r < rows; r++) *(lanes *)(scores + r * stride + key) = sum[r][0] + sum[r][1];
    }
    for (; key < size; key++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (long d = 0; d < dim; d++) sum += q[r * dim + d] * load(block[d * size + key]);
            scores[r * stride + key] = sum;
        }
}

// Where the keys and values of one sequence lie, for one KV head.
typedef struct {
    const T *keys, *values;
    const int64_t *table;
    long kv_heads, kv_head, dim, size;
} Pages;

// Ask for a block of keys or values before it is needed: blocks lie anywhere, so the CPU cannot guess the next one.
static inline void prefetch(const T *block, long count) {
    for (long i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(block + i);
}

static inline const T *key_block(const Pages *p, long block) {
    return p->keys + (p->table[block] * p->kv_heads + p->kv_head) * p->dim * p->size;
}

static inline const T *value_row(const Pages *p, long key) {
    return p->values + ((p->table[key / p->size] * p->kv_heads + p->kv_head) * p->size + key % p->size) * p->dim;
}

// Attention of up to ROWS queries of one sequence that read the same KV head. Row r sees the keys from[r] to to[r] - 1.
static inline __attribute__((always_inline)) void attend_rows(const int rows, const Pages *p, const float *q, const long *from,
                                                              const long *to, float *scores, long stride, T **out) {
    long first = from[0], last = to[rows - 1];  // rows are in order of position
    long base = first / p->size * p->size;      // scores[.][0] is that of this key
    for (long block = first / p->size; block * p->size < last; block++) {
        long next = (block + 1) * p->size < last ? block + 1 : block;
        prefetch(key_block(p, next), p->dim * p->size);
        score_block(rows, q, key_block(p, block), scores + block * p->size - base, stride, p->dim, p->size);
    }
    float inverse[ROWS];
    for (int r = 0; r < rows; r++) {
        float *s = scores + r * stride - base, most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
        for (long key = from[r]; key < to[r]; key++) most = s[key] > most ? s[key] : most;
#pragma omp simd reduction(+ : sum)
        for (long key = from[r]; key < to[r]; key++) sum += s[key] = fast_exp(s[key] - most);
        for (long key = first; key < from[r]; key++) s[key] = 0;
        for (long key = to[r]; key < last; key++) s[key] = 0;
        inverse[r] = 1.0f / sum;
    }
    long d = 0;
    for (; d + LANES <= p->dim; d += LANES) {
        lanes sum[ROWS][2] = {};
        for (long block = first / p->size; block * p->size < last; block++) {
            long key = block * p->size < first ? first : block * p->size;
            long end = (block + 1) * p->size < last ? (block + 1) * p->size : last;
            if (d == 0 && end < last) prefetch(value_row(p, end), p->dim * p->size);
            const T *v = value_row(p, key) + d;
            for (; key + 2 <= end; key += 2, v += 2 * p->dim) {
                lanes even = load_lanes(v), odd = load_lanes(v + p->dim);
                for (int r = 0; r < rows; r++) {
                    sum[r][0] += scores[r * stride + key - base] * even;
                    sum[r][1] += scores[r * stride + key + 1 - base] * odd;
                }
            }
            if (key < end) {
                lanes value = load_lanes(v);
                for (int r = 0; r < rows; r++) sum[r][0] += scores[r * stride + key - base] * value;
            }
        }
        for (int r = 0; r < rows; r++) {
            lanes mean = (sum[r][0] + sum[r][1]) * inverse[r];
            for (int l = 0; l < LANES; l++) out[r][d + l] = store(mean[l]);
        }
    }
    for (; d < p->dim; d++)
        for (int r = 0; r < rows; r++) {
            float sum = 0;
            for (long key = first; key < last; key++) sum += scores[r * stride + key - base] * load(value_row(p, key)[d]);
            out[r][d] = store(sum * inverse[r]);
        }
}

typedef struct { void *memory; size_t bytes; } Workspace;  // kept from call to call, one for each thread
static _Thread_local Workspace for_scores, for_activations;

static void *reserve(Workspace *workspace, size_t bytes) {
    if (bytes > workspace->bytes) {
        free(workspace->memory);
        workspace->memory = malloc(bytes);
        workspace->bytes = workspace->memory ? bytes : 0;
    }
    return workspace->memory;
}

// Write the keys and values of all tokens into their slots, then let every query attend to its past over the pages.
// A tile is ROWS (token, query head) pairs of one sequence that share a KV head. Returns 1 if memory ran out.
int paged_attention(const T *q, const T *k, const T *v, long q_stride, long k_stride, long v_stride, T *keys, T *values,
                    const int64_t *starts, const int64_t *seq_lens, const int64_t *table, const int64_t *slots, T *out,
                    long num_seqs, long num_tokens, long heads, long kv_heads, long dim, long size, long max_blocks,
                    long max_seq_len, long window, float scale) {
    long group = heads / kv_heads, failed = 0;
    long *tiles = malloc((num_seqs + 1) * sizeof(long));  // tiles of the sequences before each
    if (!tiles) return 1;
    tiles[0] = 0;
    for (long s = 0; s < num_seqs; s++) tiles[s + 1] = tiles[s] + ((starts[s + 1] - starts[s]) * group + ROWS - 1) / ROWS;
    long stride = (max_seq_len + 2 * size + LANES - 1) / LANES * LANES;
#pragma omp parallel reduction(| : failed)
    {
#pragma omp for
        for (long i = 0; i < num_tokens; i++)
            for (long h = 0; h < kv_heads; h++) {
                long head = (slots[i] / size * kv_heads + h) * dim * size, offset = slots[i] % size;
                for (long d = 0; d < dim; d++) keys[head + d * size + offset] = k[i * k_stride + h * dim + d];
                memcpy(values + head + offset * dim, v + i * v_stride + h * dim, dim * sizeof(T));
            }
        float *scores = reserve(&for_scores, ROWS * (stride + dim) * sizeof(float));
        failed |= !scores;
#pragma omp for schedule(dynamic)
        for (long item = 0; item < tiles[num_seqs] * kv_heads; item++) {
            if (!scores) continue;
            long tile = item / kv_heads, seq = 0, high = num_seqs;
            while (high - seq > 1) {
                long middle = (seq + high) / 2;
                if (tiles[middle] <= tile) seq = middle; else high = middle;
            }
            long count = starts[seq + 1] - starts[seq], before = seq_lens[seq] - count;
            Pages pages = {keys, values, table + seq * max_blocks, kv_heads, item % kv_heads, dim, size};
            float *queries = scores + ROWS * stride;
            long from[ROWS], to[ROWS], row = (tile - tiles[seq]) * ROWS;
            int rows = count * group - row < ROWS ? count * group - row : ROWS;
            T *places[ROWS];
            for (int r = 0; r < rows; r++) {
                long token = (row + r) / group, head = pages.kv_head * group + (row + r) % group;
                to[r] = before + token + 1;
                from[r] = window && to[r] > window ? to[r] - window : 0;
                places[r] = out + ((starts[seq] + token) * heads + head) * dim;
                for (long d = 0; d < dim; d++) queries[r * dim + d] = load(q[(starts[seq] + token) * q_stride + head * dim + d]) * scale;
            }
            switch (rows) {  // a constant each, so that the compiler keeps all sums in registers
                case 1: attend_rows(1, &pages, queries, from, to, scores, stride, places); break;
                case 2: attend_rows(2, &pages, queries, from, to, scores, stride, places); break;
                case 3: attend_rows(3, &pages, queries, from, to, scores, stride, places); break;
                case 4: attend_rows(4, &pages, queries, from, to, scores, stride, places); break;
                case 5: attend_rows(5, &pages, queries, from, to, scores, stride, places); break;
                case 6: attend_rows(6, &pages, queries, from, to, scores, stride, places); break;
                case 7: attend_rows(7, &pages, queries, from, to, scores, stride, places); break;
                default: attend_rows(8, &pages, queries, from, to, scores, stride, places);
            }
        }
    }
    free(tiles);
    return failed;
}

// The weights of a decoder layer; a bias or a head norm that it does not have is NULL. See `native.Layer`.
typedef struct {
    const T *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *post_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    long hidden, heads, kv_heads, dim, intermediate, window;
    float eps;
} Layer;

// A whole decoder layer, in place on x [tokens, hidden]: what `DecoderLayer.forward` says, in one call. Returns 1 if memory
// ran out.
int decoder_layer(const Layer *w, T *x, const T *cosines, const T *sines, T *keys, T *values, const int64_t *starts,
                  const int64_t *seq_lens, const int64_t *table, const int64_t *slots, long num_seqs, long tokens, long block_size,
                  long max_blocks, long max_seq_len) {
    long q_size = w->heads * w->dim, kv_size = w->kv_heads * w->dim, qkv_size = q_size + 2 * kv_size;
    long wide = w->hidden > w->intermediate ? w->hidden : w->intermediate;
    long sizes[] = {wide, qkv_size, q_size + kv_size, q_size, 2 * w->intermediate};
    T *place[5];
    for (int i = 1; i < 5; i++) sizes[i] += sizes[i - 1];
    T *memory = reserve(&for_activations, sizes[4] * tokens * sizeof(T));
    if (!memory) return 1;
    for (int i = 0; i < 5; i++) place[i] = memory + (i ? sizes[i - 1] : 0) * tokens;
    T *normed = place[0], *qkv = place[1], *rotated = place[2], *attended = place[3], *gate_up = place[4];

    rms_norm(x, w->input_norm, normed, tokens, w->hidden, 1, w->hidden, w->hidden, w->eps);
    linear(normed, w->qkv, w->qkv_bias, NULL, qkv, tokens, qkv_size, w->hidden);
    if (w->q_norm) rms_norm(qkv, w->q_norm, qkv, tokens * w->heads, w->dim, w->heads, qkv_size, qkv_size, w->eps);
    if (w->k_norm) rms_norm(qkv + q_size, w->k_norm, qkv + q_size, tokens * w->kv_heads, w->dim, w->kv_heads, qkv_size, qkv_size, w->eps);
    rotate(qkv, cosines, sines, rotated, tokens, w->heads + w->kv_heads, w->dim, qkv_size);
    if (paged_attention(rotated, rotated + q_size, qkv + q_size + kv_size, q_size + kv_size, q_size + kv_size, qkv_size, keys, values,
                        starts, seq_lens, table, slots, attended, num_seqs, tokens, w->heads, w->kv_heads, w->dim, block_size,
                        max_blocks, max_seq_len, w->window, 1.0f / sqrtf(w->dim)))
        return 1;
    linear(attended, w->o, w->o_bias, x, x, tokens, w->hidden, q_size);
    rms_norm(x, w->post_norm, normed, tokens, w->hidden, 1, w->hidden, w->hidden, w->eps);
    linear(normed, w->gate_up, w->gate_up_bias, NULL, gate_up, tokens, 2 * w->intermediate, w->hidden);
    silu_mul(gate_up, normed, tokens, w->intermediate);
    linear(normed, w->down, w->down_bias, x, x, tokens, w->hidden, w->intermediate);
    return 0;
}
