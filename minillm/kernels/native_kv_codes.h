// What a page holds: numbers of T or, compiled with -DKV_INT8 or -DKV_FP8, 8-bit codes with a scale for each vector. Written,
// and read back as floats. Built in chapter 17. `minillm/kv_cache/quantized.py` says the same in PyTorch.

#if !defined(KV_INT8) && !defined(KV_FP8)

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

#ifdef KV_INT8
static const float LARGEST = 127.0f;

static inline lanes read_lanes(const C *p) { return __builtin_convertvector(widen_bytes(p), lanes); }

static inline float read_one(C code) { return code; }

static inline C encode(float x) {  // |x| <= LARGEST; to the nearest, ties to even
    union { float value; uint32_t bits; } u = {x + 12582912.0f};  // adding 1.5 * 2^23 rounds, and leaves the number in the low bits
    return (C)u.bits;
}
#else
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
#endif

// One key or value to its place in a page, its dimensions `step` apart, and its scale.
static inline void store_vector(const T *x, long dim, C *place, long step, float *scale) {
    float most = 0;
    for (long d = 0; d < dim; d++) {
        float size = fabsf(load(x[d]));
        most = size > most || size != size ? size : most;
    }
    float found = most / LARGEST;
    *scale = found == 0.0f ? 1.0f : found;
    for (long d = 0; d < dim; d++) {
        float code = load(x[d]) / *scale;
        place[d * step] = encode(code > LARGEST ? LARGEST : code < -LARGEST ? -LARGEST : code);
    }
}

#endif
