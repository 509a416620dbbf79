// What a CPU does between two matrix products, each in one pass over its data. Built in chapter 14.
//
// Compiled twice, for float and (with -DBF16) for bfloat16; all arithmetic is float32. `minillm/kernels/native.py`
// compiles, loads and calls it, and names the PyTorch twin of every function here.

#include "native_base.h"
#include "native_linear.h"
#include "native_quant.h"
#include "native_kv_codes.h"
#include "native_attention.h"

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

static _Thread_local Workspace for_activations;

// The weights of a decoder layer; a bias or a head norm that it does not have is NULL. See `native.Layer`.
typedef struct {
    Matrix qkv, o, gate_up, down;
    const T *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *input_norm, *q_norm, *k_norm, *post_norm;
    long hidden, heads, kv_heads, dim, intermediate;
    float eps;
} Layer;

// A whole decoder layer, in place on x [tokens, hidden]: what `DecoderLayer.forward` says, in one call. Returns 1 if memory
// ran out.
int decoder_layer(const Layer *w, T *x, const T *cosines, const T *sines, const Pages *pages, const Sequences *seqs,
                  const float *turn, long tokens) {
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
    if (multiply(&w->qkv, normed, w->qkv_bias, NULL, qkv, tokens)) return 1;
    if (w->q_norm) rms_norm(qkv, w->q_norm, qkv, tokens * w->heads, w->dim, w->heads, qkv_size, qkv_size, w->eps);
    if (w->k_norm) rms_norm(qkv + q_size, w->k_norm, qkv + q_size, tokens * w->kv_heads, w->dim, w->kv_heads, qkv_size, qkv_size, w->eps);
    rotate(qkv, cosines, sines, rotated, tokens, w->heads + w->kv_heads, w->dim, qkv_size);
    if (paged_attention(pages, seqs, rotated, rotated + q_size, qkv + q_size + kv_size, q_size + kv_size, q_size + kv_size, qkv_size,
                        turn, attended, tokens, w->heads, 1.0f / sqrtf(w->dim)))
        return 1;
    if (multiply(&w->o, attended, w->o_bias, x, x, tokens)) return 1;
    rms_norm(x, w->post_norm, normed, tokens, w->hidden, 1, w->hidden, w->hidden, w->eps);
    if (multiply(&w->gate_up, normed, w->gate_up_bias, NULL, gate_up, tokens)) return 1;
    silu_mul(gate_up, normed, tokens, w->intermediate);
    if (multiply(&w->down, normed, w->down_bias, x, x, tokens)) return 1;
    return 0;
}
