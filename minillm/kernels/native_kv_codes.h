// What a page holds: numbers of T or, compiled with -DKV_INT8, -DKV_FP8 or -DKV_INT4, codes with a scale for each vector. Written,
// and read back as floats. Built in chapter 17. `minillm/kv_cache/quantized.py` says the same in PyTorch.
//
// A byte of int4 holds two codes of one vector, dimension 2i in its low half and 2i + 1 in its high half: the keys of a block are
// [dim / 2][size] bytes, a value is [dim / 2].

#ifdef KV_INT4
enum { IN_BYTE = 2 };  // codes
#else
enum { IN_BYTE = 1 };
#endif

#if !defined(KV_INT8) && !defined(KV_FP8) && !defined(KV_INT4)

enum { SCALED = 0 };
typedef T C;
static inline lanes read_lanes(const C *p) { return load_lanes(p); }
static inline float read_one(C code) { return load(code); }

// One key or value to its place in a page, its dimensions `step` apart.
static inline void store_vector(const T *x, long dim, C *place, long step, float *scale) {
    (void)scale;
    for (long d = 0; d < dim; d++) place[d * step] = x[d];
}

#else

enum { SCALED = 1 };
typedef int8_t C;

#ifdef KV_FP8
static const float LARGEST = 448.0f;

// The bits of an e4m3 number, moved to where a float has them, are that number / 2^120: only the bias of the exponent
// differs, also below the smallest normal number. Shifting right as a signed number leaves the sign on top.
enum { SIGN_AND_NUMBER = (int32_t)0x87f00000 };

static inline lanes read_lanes(const C *p) {
    return (lanes)(widen_bytes(p) << 24 >> 4 & SIGN_AND_NUMBER) * 0x1p120f;
}

static inline float read_one(C code) {
    union { int32_t bits; float value; } u = {(int32_t)((uint32_t)code << 24) >> 4 & SIGN_AND_NUMBER};
    return u.value * 0x1p120f;
}

static inline C encode(float x) {  // |x| <= LARGEST; to the nearest, ties to even
    union { float value; uint32_t bits; } u = {x};
    uint32_t sign = u.bits >> 24 & 0x80;
    u.bits &= 0x7fffffff;
    if (u.value < 0x1p-6f) {  // below the smallest normal number: whole multiples of 2^-9
        u.value = u.value * 512.0f + 12582912.0f;
        return (C)(sign | (u.bits & 0xf));
    }
    return (C)(sign | (((u.bits + 0x7ffff + (u.bits >> 20 & 1)) >> 20) - (120 << 3)));
}
#else
#ifdef KV_INT4
static const float LARGEST = 7.0f;
#else
static const float LARGEST = 127.0f;

static inline lanes read_lanes(const C *p) { return __builtin_convertvector(widen_bytes(p), lanes); }

static inline float read_one(C code) { return code; }
#endif

static inline C encode(float x) {  // |x| <= LARGEST; to the nearest, ties to even
    union { float value; uint32_t bits; } u = {x + 12582912.0f};  // adding 1.5 * 2^23 rounds, and leaves the number in the low bits
    return (C)u.bits;
}
#endif

static inline C code_of(T x, float scale) {
    float code = load(x) / scale;
    return encode(code > LARGEST ? LARGEST : code < -LARGEST ? -LARGEST : code);
}

// One key or value to its place in a page, its dimensions (bytes of two in int4) `step` apart, and its scale.
static inline void store_vector(const T *x, long dim, C *place, long step, float *scale) {
    float most = 0;
    for (long d = 0; d < dim; d++) {
        float size = fabsf(load(x[d]));
        most = size > most || size != size ? size : most;
    }
    float found = most / LARGEST;
    *scale = found == 0.0f ? 1.0f : found;
#ifdef KV_INT4
    for (long d = 0; d < dim; d += 2)
        place[d / 2 * step] = (C)((code_of(x[d], *scale) & 15) | (uint8_t)code_of(x[d + 1], *scale) << 4);
#else
    for (long d = 0; d < dim; d++) place[d * step] = code_of(x[d], *scale);
#endif
}

#endif

// Reading: dimension d of a key, whose bytes lie `size` apart from `at` on, or of a value, whose bytes lie side by side.
#ifdef KV_INT4
static inline float half_of(C byte, long d) { return d % 2 ? byte >> 4 : (int8_t)((uint8_t)byte << 4) >> 4; }
static inline float key_one(const C *at, long d, long size) { return half_of(at[d / 2 * size], d); }
static inline float value_one(const C *at, long d) { return half_of(at[d / 2], d); }

static inline lanes key_lanes(const C *at, long d, long size) {  // of LANES keys
    ints bytes = widen_bytes(at + d / 2 * size);
    return __builtin_convertvector(d % 2 ? bytes >> 4 : bytes << 28 >> 28, lanes);
}

// LANES dimensions from an even one on are 8 bytes, two words: each lane shifts its own half up to the sign and down again.
static inline lanes value_lanes(const C *at, long d) {
    const ints up = {28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0};
    int32_t word[2];
    memcpy(word, at + d / 2, sizeof word);
    ints words = {word[0], word[0], word[0], word[0], word[0], word[0], word[0], word[0],
                  word[1], word[1], word[1], word[1], word[1], word[1], word[1], word[1]};
    return __builtin_convertvector(words << up >> 28, lanes);
}
#else
static inline float key_one(const C *at, long d, long size) { return read_one(at[d * size]); }
static inline float value_one(const C *at, long d) { return read_one(at[d]); }
static inline lanes key_lanes(const C *at, long d, long size) { return read_lanes(at + d * size); }
static inline lanes value_lanes(const C *at, long d) { return read_lanes(at + d); }
#endif
