// Which token comes next: the argmax of logits, or of logits with Gumbel noise. Built in chapter 14; the noise in chapter 01.
//
// All numbers are float, whatever T is. The noise is minillm/sampling/noise.py's, and the tokens are those of an argmax over all of it.

enum { DRAWN = 64 };  // tokens whose noise is made together; a multiple of LANES, so that a number has the same bits in any call

static inline uint64_t random_bits(uint64_t key, uint64_t counter) {  // SplitMix64
    uint64_t bits = key + (counter + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

static inline float uniform(uint64_t key, uint64_t token_id) {  // in [2^-63, 1 - 2^-24]
    int64_t bits = (random_bits(key, token_id) & INT64_MAX) | 1;
    float u = (float)bits * 0x1p-63f;
    return u > 1 - 0x1p-24f ? 1 - 0x1p-24f : u;
}

// noise = -log(-log(1 - u)), DRAWN of each. Not inlined: see `silu_mul_parts`.
static __attribute__((noinline)) void gumbel_of(const float *u, float *noise) {
    for (long j = 0; j < DRAWN; j++) {
        // log1p(-u): what rounding took from 1 - u is put back by the factor.
        float rest = 1.0f - u[j], lost = 1.0f - rest;
        float exponential = lost == 0.0f ? u[j] : -fast_log(rest) * (u[j] / lost);
        noise[j] = -fast_log(exponential);
    }
}

// Standard Gumbel noise [rows, count]: see minillm/sampling/noise.py.
void gumbel_noise(const int64_t *seeds, const int64_t *positions, const int64_t *token_ids, float *out, long rows, long count) {
#pragma omp parallel for collapse(2) num_threads(team_size()) if (rows * count > PARALLEL_FROM / 4)
    for (long i = 0; i < rows; i++)
        for (long from = 0; from < count; from += DRAWN) {
            uint64_t key = random_bits(seeds[i], positions[i]);
            long size = count - from < DRAWN ? count - from : DRAWN;
            float u[DRAWN] = {}, noise[DRAWN];
            for (long j = 0; j < size; j++) u[j] = uniform(key, token_ids[from + j]);
            for (long j = size; j < DRAWN; j++) u[j] = 0.5f;
            gumbel_of(u, noise);
            memcpy(out + i * count + from, noise, size * sizeof(float));
        }
}

typedef struct { float value; long at; } Found;

// The largest of x, of equal ones the first; the first that is no number, if there is one. Of none at all: -infinity at 0.
static Found largest_of(const float *x, long count) {
    enum { BLOCK_OF_LOGITS = 512 };  // the place of the largest is looked for in its block alone
    Found found = {-INFINITY, 0};
    for (long from = 0; from < count; from += BLOCK_OF_LOGITS) {
        long end = from + BLOCK_OF_LOGITS < count ? from + BLOCK_OF_LOGITS : count, j = from;
        part most[PARTS];
        int_part unordered = {};
        for (int q = 0; q < PARTS; q++) most[q] = -INFINITY - (part){};
        for (; j + LANES <= end; j += LANES)
            for (int q = 0; q < PARTS; q++) {
                part values = *(const part *)(x + j + q * WIDE);
                unordered |= values != values;
                most[q] = larger_part(most[q], values);
            }
        for (int q = 1; q < PARTS; q++) most[0] = larger_part(most[0], most[q]);
        float top = -INFINITY;
        int odd = 0;
        for (int l = 0; l < WIDE; l++) {
            odd |= unordered[l];
            top = most[0][l] > top ? most[0][l] : top;
        }
        for (; j < end; j++) {
            odd |= x[j] != x[j];
            top = x[j] > top ? x[j] : top;
        }
        for (long k = from; odd && k < end; k++)
            if (x[k] != x[k]) return (Found){x[k], k};
        if (top > found.value) found = (Found){top, from};
    }
    for (long k = found.at; k < count; k++)
        if (x[k] == found.value) return (Found){x[k], k};
    return found;
}

// The largest of x / temperature + noise, where x[0] is the logit of token `from`.
//
// The logarithms of the noise take most of the time, and hardly a token needs its own. -log(-log(1 - u)) is below -log(u), and the
// bits of u, read as a whole number, are its base-2 logarithm or less by up to 0.09. A block in which no token can pass the best so
// far by that bound is passed over. Float addition keeps the order of its operands, so the bound holds after it.
static Found drawn_of(const float *x, float temperature, uint64_t key, long from, long count) {
    Found best = {-INFINITY, from};
    for (long at = 0; at < count; at += DRAWN) {
        long size = count - at < DRAWN ? count - at : DRAWN;
        float u[DRAWN], scaled[DRAWN], noise[DRAWN];
        int contended = 0;
        for (long j = 0; j < size; j++) scaled[j] = x[at + j] / temperature;
        for (long j = size; j < DRAWN; j++) scaled[j] = -INFINITY;
        for (long j = 0; j < DRAWN; j++) u[j] = uniform(key, from + at + j);
        for (long j = 0; j < DRAWN; j++) {
            union { float value; int32_t bits; } number = {u[j]};
            float below = ((float)number.bits * 0x1p-23f - 127.0f) * 0.69314718f - 1e-3f;  // log(u), and what rounding may have done
            contended |= !(scaled[j] - below <= best.value);  // also where a logit is no number
        }
        if (!contended) continue;
        gumbel_of(u, noise);
        for (long j = 0; j < size; j++) {
            float value = scaled[j] + noise[j];
            if (value <= best.value) continue;
            if (!(value <= INFINITY)) return (Found){value, from + at + j};
            best = (Found){value, from + at + j};
        }
    }
    return best;
}

// One token a row of logits [rows, count], whose rows lie `stride` apart. Rows are drawn at their temperature (1 where there are
// none), or have the argmax: those that are greedy, and all where there are no seeds.
void draw(const float *logits, long stride, const float *temperatures, const int64_t *seeds, const int64_t *positions,
          const uint8_t *is_greedy, int64_t *out, long rows, long count) {
    SPAN(SAMPLING);
    long threads = team_size(), pieces = rows && rows < threads ? (threads + rows - 1) / rows : 1;
    long length = (count + pieces - 1) / pieces;
    Found found[pieces > 1 ? rows * pieces : 1];
#pragma omp parallel for collapse(2) num_threads(threads) if (rows * count > PARALLEL_FROM / 4)
    for (long i = 0; i < rows; i++)
        for (long p = 0; p < pieces; p++) {
            long from = p * length < count ? p * length : count, size = count - from < length ? count - from : length;
            const float *x = logits + i * stride + from;
            Found one;
            if (!seeds || (is_greedy && is_greedy[i])) {
                one = largest_of(x, size);
                one.at += from;
            } else
                one = drawn_of(x, temperatures ? temperatures[i] : 1.0f, random_bits(seeds[i], positions[i]), from, size);
            if (pieces == 1)
                out[i] = one.at;
            else
                found[i * pieces + p] = one;
        }
    for (long i = 0; i < rows && pieces > 1; i++) {
        Found best = {-INFINITY, 0};
        for (long p = 0; p < pieces && best.value == best.value; p++) {
            Found one = found[i * pieces + p];
            if (!(one.value <= best.value)) best = one;
        }
        out[i] = best.at;
    }
}
