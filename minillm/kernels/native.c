// What a CPU does between two matrix products, each in one pass over its data. Built in chapter 14.
//
// Compiled twice, for float and (with -DBF16) for bfloat16; all arithmetic is float32. `minillm/kernels/native.py`
// compiles, loads and calls it, and names the PyTorch twin of every function here.

#include "native_base.h"
#include "native_linear.h"
#include "native_codes.h"
#include "native_quant.h"
#include "native_w8a8.h"
#include "native_products.h"
#include "native_kv_codes.h"
#include "native_pages.h"
#include "native_in_place.h"
#include "native_few.h"
#include "native_attention.h"
#include "native_tiles.h"
#include "native_latents.h"
#include "native_lora.h"
#include "native_sampling.h"

// out = x / sqrt(mean(x^2) + eps) * weight, of one row; out may be x.
static void norm_row(const T *in, const T *weight, T *to, long size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long j = 0; j < size; j++) sum += load(in[j]) * load(in[j]);
    float scale = 1.0f / sqrtf(sum / size + eps);
    for (long j = 0; j < size; j++) to[j] = store(load(store(load(in[j]) * scale)) * load(weight[j]));
}

// Of many: row i starts at x + i / inner * stride + i % inner * size, and likewise in out.
void rms_norm(const T *x, const T *weight, T *out, long rows, long size, long inner, long stride, long out_stride, float eps) {
#pragma omp parallel for num_threads(team_size()) if (rows * size > PARALLEL_FROM)
    for (long i = 0; i < rows; i++)
        norm_row(x + i / inner * stride + i % inner * size, weight, out + i / inner * out_stride + i % inner * size, size, eps);
}

// silu(x) = x / (1 + e^-x). gelu(x), in its tanh form, = x (1 + tanh(z)) / 2 = x / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
#define GELU_TANH(x) ((x) * (1.5957691216f + 0.0713548162726f * (x) * (x)))  // 2z

// out = silu(gate) * up, or gelu, `size` of each.
static inline __attribute__((always_inline)) void gate_mul_parts(const int gelu, const T *gate, const T *up, T *out, long size) {
    const float least = gelu ? -10.0f : -88.0f;  // 0 from here on but for rounding; -infinity is NaN, and shows
    long j = 0;
    for (; j + WIDE <= size; j += WIDE) {
        T rounded[WIDE];
        part g = load_part(gate + j);
        g = either_part(g < least, g * 0.0f + least, g);
        part e = exp_part(gelu ? -GELU_TANH(g) : -g);
        store_part(rounded, g / (1.0f + e));
        store_part(out + j, load_part(rounded) * load_part(up + j));
    }
    for (; j < size; j++) {
        float g = load(gate[j]);
        g = g < least ? g * 0.0f + least : g;
        out[j] = store(load(store(g / (1.0f + fast_exp(gelu ? -GELU_TANH(g) : -g)))) * load(up[j]));
    }
}

// Not inlined: a row has the same bits from wherever it is called.
static __attribute__((noinline)) void silu_mul_parts(const T *gate, const T *up, T *out, long size) {
    gate_mul_parts(0, gate, up, out, size);
}

static __attribute__((noinline)) void gelu_mul_parts(const T *gate, const T *up, T *out, long size) {
    gate_mul_parts(1, gate, up, out, size);
}

// The same where x holds gate and then up.
static void silu_mul_row(const T *x, T *out, long size) { silu_mul_parts(x, x + size, out, size); }

void silu_mul(const T *x, T *out, long rows, long size) {
#pragma omp parallel for num_threads(team_size()) if (rows * size > PARALLEL_FROM / 2)
    for (long i = 0; i < rows; i++) silu_mul_row(x + 2 * i * size, out + i * size, size);
}

void gelu_mul(const T *x, T *out, long rows, long size) {
#pragma omp parallel for num_threads(team_size()) if (rows * size > PARALLEL_FROM / 2)
    for (long i = 0; i < rows; i++) gelu_mul_parts(x + 2 * i * size, x + (2 * i + 1) * size, out + i * size, size);
}

#include "native_experts.h"

// cos and signed sin of position * frequency, each [tokens, dim].
void rotary_angles(const int64_t *positions, const float *frequencies, const float *sin_scale, float cos_scale, T *cosines,
                   T *sines, long tokens, long dim) {
#pragma omp parallel for num_threads(team_size()) if (tokens * dim > 4096)
    for (long i = 0; i < tokens; i++)
        for (long j = 0; j < dim / 2; j++) {  // the second half repeats the first, but for the sign of sin
            float angle = (float)positions[i] * frequencies[j], c = cosf(angle), s = sinf(angle);
            T *cosine = cosines + i * dim + j, *sine = sines + i * dim + j;
            cosine[0] = cosine[dim / 2] = store(c * cos_scale);
            sine[0] = store(s * sin_scale[j]);
            sine[dim / 2] = store(s * sin_scale[j + dim / 2]);
        }
}

// out[head] = x * cos + (x with its halves swapped) * sin, of one token's heads.
static void rotate_row(const T *x, const T *c, const T *s, T *out, long heads, long dim) {
    long half = dim / 2;
    for (long h = 0; h < heads; h++, x += dim, out += dim) {
        long j = 0;
        for (; j + LANES <= half; j += LANES) {
            lanes first = load_lanes(x + j), second = load_lanes(x + j + half);
            store_lanes(out + j, first * load_lanes(c + j) + second * load_lanes(s + j));
            store_lanes(out + j + half, second * load_lanes(c + j + half) + first * load_lanes(s + j + half));
        }
        for (; j < half; j++) {
            float first = load(x[j]), second = load(x[j + half]);
            out[j] = store(first * load(c[j]) + second * load(s[j]));
            out[j + half] = store(second * load(c[j + half]) + first * load(s[j + half]));
        }
    }
}

// Tokens of x lie `stride` apart.
void rotate(const T *x, const T *cosines, const T *sines, T *out, long tokens, long heads, long dim, long stride) {
#pragma omp parallel for num_threads(team_size()) if (tokens * heads * dim > PARALLEL_FROM)
    for (long i = 0; i < tokens; i++)
        rotate_row(x + i * stride, cosines + i * dim, sines + i * dim, out + i * heads * dim, heads, dim);
}

static _Thread_local Workspace for_activations, for_chunk;

// The weights of a decoder layer; a bias or a head norm that it does not have is NULL. See `native_structs.Layer`.
typedef struct {
    Matrix qkv, o, gate_up, down;
    const T *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *input_norm, *q_norm, *k_norm, *post_norm;
    long hidden, heads, kv_heads, dim, intermediate;
    float eps;
    const Mixture *mixture;  // in place of gate_up and down, or NULL
    const LayerAdapters *adapters;  // or NULL
} Layer;

// What a layer is called with: x [tokens, hidden], which it changes, and its angles; memory for all tokens.
typedef struct {
    const Layer *w;
    T *x;
    const T *cosines, *sines;
    T *q, *attended;  // [tokens, heads * dim]
    T *normed;  // [tokens, hidden], for a mixture of experts
    const Pages *next;  // of the next layer, or NULL
} Pass;

static const LayerAdapters no_adapters;

// The tokens from `from` on that have an adapter, counted from there. Returns 1 if memory ran out.
static int group_of(const Sequences *seqs, long from, long tokens, Groups *groups) {
    *groups = (Groups){};
    return seqs->token_slots ? group_tokens(seqs->token_slots + from, tokens, groups) : 0;
}

// x [rows, out] += in [rows, in] times a matrix, with what adapters add to the product; it is rounded before it is added, whether
// there are any or not. `change` [rows, out] is memory for that. `alone`: by the thread that calls. Returns 1 if memory ran out.
static int add_multiplied(const Matrix *m, const T *bias, const AdaptedMatrix *adapters, const Groups *groups, const T *in, T *x,
                          T *change, long rows, int alone) {
    int (*product)(const Matrix *, const T *, const T *, const T *, T *, long) = alone ? multiply_chunk : multiply;
    if (!groups->count || !adapted_rank(adapters)) return product(m, in, bias, x, x, rows);
    if (product(m, in, bias, NULL, change, rows) || add_adapters(adapters, groups, in, m->in, change, m->out, alone)) return 1;
#pragma omp parallel for num_threads(team_size()) if (!alone && rows * m->out > PARALLEL_FROM)
    for (long i = 0; i < rows; i++)
        for (long j = i * m->out; j < (i + 1) * m->out; j++) x[j] = store(load(x[j]) + load(change[j]));
    return 0;
}

static void qkv_of_token(const Layer *w, T *qkv, const T *cosine, const T *sine, T *q, T *k) {
    T *key = qkv + w->heads * w->dim;
    for (long h = 0; w->q_norm && h < w->heads; h++) norm_row(qkv + h * w->dim, w->q_norm, qkv + h * w->dim, w->dim, w->eps);
    for (long h = 0; w->k_norm && h < w->kv_heads; h++) norm_row(key + h * w->dim, w->k_norm, key + h * w->dim, w->dim, w->eps);
    rotate_row(qkv, cosine, sine, q, w->heads, w->dim);
    rotate_row(key, cosine, sine, k, w->kv_heads, w->dim);
}

// Many tokens: each thread takes a chunk of them through all that comes before attention, then through all that comes behind it.
// What a chunk passes on stays in the second-level cache, and threads wait for each other twice a layer. So all threads take part,
// also while the team is smaller (native_base.h): one that shares its core with another process does less, and keeps none waiting
// for longer than the whole layer would take without it.
static long by_chunks(const Pass *pass, const Pages *pages, const Sequences *seqs, const float *turn, long tokens, long chunk) {
    const Layer *w = pass->w;
    long q_size = w->heads * w->dim, kv_size = w->kv_heads * w->dim, qkv_size = q_size + 2 * kv_size;
    long wide = w->hidden > w->intermediate ? w->hidden : w->intermediate, widest = qkv_size + kv_size;
    if (2 * w->intermediate > widest) widest = 2 * w->intermediate;
    long failed = 0, taken = 0;
    const LayerAdapters *adapters = w->adapters ? w->adapters : &no_adapters;
#pragma omp parallel reduction(| : failed) num_threads(omp_get_max_threads())
    {
        T *normed = reserve(&for_chunk, chunk * (wide + widest + w->hidden) * sizeof(T)), *made = normed + chunk * wide;
        T *change = made + chunk * widest;
        Groups groups;
        failed |= !normed;
        {
            SPAN(PRODUCTS);
#pragma omp for schedule(monotonic : dynamic)
            for (long from = 0; from < tokens; from += chunk) {
                if (failed) continue;
                long count = tokens - from < chunk ? tokens - from : chunk;
                T *keys = made + count * qkv_size;
                for (long i = 0; i < count; i++)
                    norm_row(pass->x + (from + i) * w->hidden, w->input_norm, normed + i * w->hidden, w->hidden, w->eps);
                failed |= multiply_chunk(&w->qkv, normed, w->qkv_bias, NULL, made, count) || group_of(seqs, from, count, &groups) ||
                          add_adapters(&adapters->qkv, &groups, normed, w->hidden, made, qkv_size, 1);
                for (long i = 0; i < count; i++) {
                    long token = from + i, angle = token * w->dim;
                    T *qkv = made + i * qkv_size;
                    qkv_of_token(w, qkv, pass->cosines + angle, pass->sines + angle, pass->q + token * q_size, keys + i * kv_size);
                    store_token(pages, seqs->slots[token], keys + i * kv_size, qkv + q_size + kv_size);
                }
            }
        }
        failed |= attend_all(pages, seqs, pass->q, q_size, turn, pass->attended, tokens, w->heads, 1.0f / sqrtf(w->dim), &taken);
        begin_feed(pass->next, seqs);
#pragma omp barrier
        {
            SPAN(PRODUCTS);
#pragma omp for schedule(monotonic : dynamic)
            for (long from = 0; from < tokens; from += chunk) {
                if (failed) continue;
                long count = tokens - from < chunk ? tokens - from : chunk;
                T *x = pass->x + from * w->hidden;
                failed |= group_of(seqs, from, count, &groups) ||
                          add_multiplied(&w->o, w->o_bias, &adapters->o, &groups, pass->attended + from * q_size, x, change, count, 1);
                T *to = w->mixture ? pass->normed + from * w->hidden : normed;
                for (long i = 0; i < count; i++) norm_row(x + i * w->hidden, w->post_norm, to + i * w->hidden, w->hidden, w->eps);
                if (w->mixture) continue;  // experts take the rows of all chunks at once
                failed |= multiply_chunk(&w->gate_up, normed, w->gate_up_bias, NULL, made, count) ||
                          add_adapters(&adapters->gate_up, &groups, normed, w->hidden, made, 2 * w->intermediate, 1);
                for (long i = 0; i < count; i++)
                    silu_mul_row(made + 2 * i * w->intermediate, normed + i * w->intermediate, w->intermediate);
                failed |= add_multiplied(&w->down, w->down_bias, &adapters->down, &groups, normed, x, change, count, 1);
            }
        }
    }
    return failed || (w->mixture && add_mixture(w->mixture, pass->normed, pass->x, tokens));
}

// Few tokens: all threads share each product, and its weights are read once.
static long by_products(const Pass *pass, const Pages *pages, const Sequences *seqs, const float *turn, long tokens) {
    const Layer *w = pass->w;
    T *x = pass->x;
    long q_size = w->heads * w->dim, kv_size = w->kv_heads * w->dim, qkv_size = q_size + 2 * kv_size;
    long wide = w->hidden > w->intermediate ? w->hidden : w->intermediate, failed = 0, taken = 0;
    long row = wide + qkv_size + kv_size + 2 * w->intermediate + w->hidden;
    T *normed = reserve(&for_chunk, tokens * row * sizeof(T));
    Groups groups;
    if (!normed || group_of(seqs, 0, tokens, &groups)) return 1;
    T *qkv = normed + tokens * wide, *keys = qkv + tokens * qkv_size, *gate_up = keys + tokens * kv_size;
    T *change = gate_up + tokens * 2 * w->intermediate;
    const LayerAdapters *adapters = w->adapters ? w->adapters : &no_adapters;

    rms_norm(x, w->input_norm, normed, tokens, w->hidden, 1, w->hidden, w->hidden, w->eps);
    if (multiply(&w->qkv, normed, w->qkv_bias, NULL, qkv, tokens)) return 1;
    if (add_adapters(&adapters->qkv, &groups, normed, w->hidden, qkv, qkv_size, 0)) return 1;
#pragma omp parallel reduction(| : failed) num_threads(team_size())
    {
#pragma omp for
        for (long i = 0; i < tokens; i++) {
            T *mine = qkv + i * qkv_size, *key = keys + i * kv_size;
            qkv_of_token(w, mine, pass->cosines + i * w->dim, pass->sines + i * w->dim, pass->q + i * q_size, key);
            store_token(pages, seqs->slots[i], key, mine + q_size + kv_size);
        }
        failed |= attend_all(pages, seqs, pass->q, q_size, turn, pass->attended, tokens, w->heads, 1.0f / sqrtf(w->dim), &taken);
        begin_feed(pass->next, seqs);
    }
    if (failed || add_multiplied(&w->o, w->o_bias, &adapters->o, &groups, pass->attended, x, change, tokens, 0)) return 1;
    rms_norm(x, w->post_norm, normed, tokens, w->hidden, 1, w->hidden, w->hidden, w->eps);
    if (w->mixture) return add_mixture(w->mixture, normed, x, tokens);
    if (multiply(&w->gate_up, normed, w->gate_up_bias, NULL, gate_up, tokens)) return 1;
    if (add_adapters(&adapters->gate_up, &groups, normed, w->hidden, gate_up, 2 * w->intermediate, 0)) return 1;
    silu_mul(gate_up, normed, tokens, w->intermediate);
    return add_multiplied(&w->down, w->down_bias, &adapters->down, &groups, normed, x, change, tokens, 0);
}

// Tokens a thread from which threads take tokens, not products. Each then reads all weights, which takes longer than the unit's
// work on 32 rows.
#ifdef IN_TILES
enum { CHUNKS_FROM = 64 };
#else
enum { CHUNKS_FROM = 32 };
#endif
long chunks_from(void) { return CHUNKS_FROM; }

// A whole decoder layer, in place on x [tokens, hidden]: what `DecoderLayer.forward` says. Returns 1 if memory ran out.
static int run_layer(const Layer *w, T *x, const T *cosines, const T *sines, const Pages *pages, const Pages *next,
                     const Sequences *seqs, const float *turn, long tokens) {
    long q_size = w->heads * w->dim, threads = omp_get_max_threads(), parts = (tokens + threads * CHUNK - 1) / (threads * CHUNK) * threads;
    T *q = reserve(&for_activations, tokens * (2 * q_size + (w->mixture ? w->hidden : 0)) * sizeof(T));
    if (!q) return 1;
    Pass pass = {w, x, cosines, sines, q, q + tokens * q_size, q + 2 * tokens * q_size, next};
    if (tokens < CHUNKS_FROM * threads) return by_products(&pass, pages, seqs, turn, tokens);
    long chunk = whole((tokens + parts - 1) / parts, TILE_ROWS);
    return by_chunks(&pass, pages, seqs, turn, tokens, chunk < CHUNK ? chunk : CHUNK);
}

// One of them in one call.
int decoder_layer(const Layer *w, T *x, const T *cosines, const T *sines, const Pages *pages, const Sequences *seqs,
                  const float *turn, long tokens) {
    return run_layer(w, x, cosines, sines, pages, NULL, seqs, turn, tokens);
}

static _Thread_local Workspace for_step;

// What a decoder has besides the pages of its layers. See `native_structs.DecoderWeights`.
typedef struct {
    const Layer *const *layers;
    const T *norm;  // the last one
    const float *frequencies, *sin_scale;
    Matrix head;
    long count, hidden, dim;
    float cos_scale, eps;
} DecoderWeights;

// All that a model computes from its embeddings x [tokens, hidden] to the logits [num_wanted, head.out] of the tokens `wanted`:
// what `Decoder.forward` says. Between two calls a Python program takes as long as for a small product, since the weights have
// pushed it out of the caches. Returns 1 if memory ran out, 2 if there is no such token.
int decoder(const DecoderWeights *d, const Pages *const *pages, T *x, const int64_t *positions, const Sequences *seqs, const float *turn,
            const int64_t *wanted, long num_wanted, float *logits, long tokens) {
    for (long i = 0; i < num_wanted; i++)
        if (wanted[i] < 0 || wanted[i] >= tokens) return 2;
    long most = num_wanted < CHUNK ? num_wanted : CHUNK;
    T *cosines = reserve(&for_step, (2 * tokens * d->dim + most * d->hidden) * sizeof(T));
    if (!cosines) return 1;
    T *sines = cosines + tokens * d->dim, *normed = sines + tokens * d->dim;
    rotary_angles(positions, d->frequencies, d->sin_scale, d->cos_scale, cosines, sines, tokens, d->dim);
    for (long i = 0; i < d->count; i++) {
        const Pages *next = i + 1 < d->count ? pages[i + 1] : NULL;
        if (run_layer(d->layers[i], x, cosines, sines, pages[i], next, seqs, turn, tokens)) return 1;
    }
    for (long from = 0; from < num_wanted; from += CHUNK) {
        long rows = num_wanted - from < CHUNK ? num_wanted - from : CHUNK;
        Target target = {.size = d->head.out, .logits = logits + from * d->head.out};
#pragma omp parallel for num_threads(team_size()) if (rows * d->hidden > PARALLEL_FROM)
        for (long i = 0; i < rows; i++) norm_row(x + wanted[from + i] * d->hidden, d->norm, normed + i * d->hidden, d->hidden, d->eps);
        if (multiply_to(&target, &d->head, normed, rows)) return 1;
    }
    return 0;
}
