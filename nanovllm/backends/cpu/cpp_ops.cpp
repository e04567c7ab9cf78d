// The kernels of cpp_ops.py and decoder.py. Each computes what a plain layer computes, in float32 and in one pass over memory.
//
// A Value is what layers pass on and what parameters and the KV cache hold: float, or, with -DVALUES_IN_BFLOAT16, bfloat16.
// Then products multiply bfloat16 and add up in float32, by the instruction that AVX512_BF16 has for it.
//
// T tokens, B sequences, H query heads, G KV heads, D head size, W block-table width. Arrays are dense unless a stride
// is given. Each token or sequence is computed alone, so its result does not depend on the batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

// The upper half of a float.
struct Bfloat16 {
    uint16_t bits;

    // Round to nearest, ties to even. A NaN stays one, because its lower half is 0: it came from a bfloat16 or from the
    // processor.
    Bfloat16& operator=(float x) {
        union { float value; uint32_t bits; } of = {x};
        bits = (of.bits + 0x7fff + (of.bits >> 16 & 1)) >> 16;
        return *this;
    }
    operator float() const {
        union { uint32_t bits; float value; } of = {static_cast<uint32_t>(bits) << 16};
        return of.value;
    }
};

#ifdef VALUES_IN_BFLOAT16
typedef Bfloat16 Value;
#else
typedef float Value;
#endif

// The flags let compilers suppose that each float is finite. So NaN and infinity are looked for, and made, by their bits.
constexpr int32_t INFINITE = 0x7f800000, NAN_BITS = 0x7fc00000;  // bits of NaN, without the sign, are above INFINITE

static inline int32_t bits_of(float x) {
    union { float value; int32_t bits; } of = {x};
    return of.bits;
}

static inline float float_of(int32_t x) {
    union { int32_t bits; float value; } of = {x};
    return of.value;
}

template <typename Number>
static float dot(const Number* a, const Number* b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// Compute e^x as 2^n times a polynomial, with an error within 2e-7. Unlike expf, compilers turn this into vector code.
// Of a NaN it makes a number.
static inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first of few bits
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    return p * float_of((static_cast<int32_t>(n) + 127) << 23);
}

// LANES floats in a register. A panel is the part of a weight that makes WIDTH outputs; a tile is ROWS rows of these.
// The sums of ROWS x 2 registers, two registers of the weight and one of x take most registers that a processor has.
#ifdef __AVX512F__
constexpr int64_t LANES = 16, ROWS = 12;
#else
constexpr int64_t LANES = 8, ROWS = 6;
#endif
constexpr int64_t WIDTH = 2 * LANES;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

extern "C" int64_t panel_width() { return WIDTH; }

// A panel's numbers are float, or of 16 bits where these hold the floats exactly. All become float before they are
// multiplied, but a bfloat16 by a bfloat16. Processors without an instruction for it have no float16 here. Two neighbouring
// inputs' bfloat16 lie side by side: one shift and one mask make floats of them.
struct Float16 {
    uint16_t bits;
};
enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, GROUPED };  // of a weight

typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t)), aligned(sizeof(uint16_t)), may_alias));

static inline Lanes load_lanes(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

#if defined(__F16C__)
extern "C" int64_t takes_float16() { return true; }
static inline Lanes load_lanes(const Float16* from) {
#ifdef __AVX512F__
    return reinterpret_cast<Lanes>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
    return reinterpret_cast<Lanes>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
}
#else
extern "C" int64_t takes_float16() { return false; }
static inline Lanes load_lanes(const Float16* from) { return Lanes{}; }
#endif

// What is added to a product: bias [N], and residual [T, N], which may be the result's memory. Either may be null.
struct Added {
    const Value *bias, *residual;
};

// Multiply `rows` rows of x, which are K apart, by a panel [K, WIDTH], or [K / 2, WIDTH, 2] of bfloat16, into rows of `out`
// that are N apart, as those of the residual are. Each sum runs over k in order, whatever the number of rows, so a row's
// result does not depend on other rows.
template <int64_t rows, typename Number>
static void multiply_tile(const Value* x, const Number* panel, Added added, Value* out, int64_t K, int64_t N) {
    Lanes sums[rows][2] = {};
#ifdef VALUES_IN_BFLOAT16
    const Bits* pairs = reinterpret_cast<const Bits*>(panel);
    for (int64_t k = 0; k < K; k += 2, pairs += 2)
#pragma GCC unroll 12
        for (int64_t r = 0; r < rows; r++) {
            int32_t both;
            std::memcpy(&both, x + r * K + k, sizeof both);
            for (int64_t half = 0; half < 2; half++)
                sums[r][half] = _mm512_dpbf16_ps(sums[r][half], (__m512bh)_mm512_set1_epi32(both), (__m512bh)pairs[half]);
        }
#else
    auto add_input = [&](int64_t k, Lanes left, Lanes right) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int64_t r = 0; r < rows; r++) {
            sums[r][0] += x[r * K + k] * left;
            sums[r][1] += x[r * K + k] * right;
        }
    };
    if constexpr (std::is_same_v<Number, Bfloat16>) {
        const Bits* pairs = reinterpret_cast<const Bits*>(panel);
        for (int64_t k = 0; k + 1 < K; k += 2, pairs += 2) {
            const Bits left = pairs[0], right = pairs[1];
            add_input(k, reinterpret_cast<Lanes>(left << 16), reinterpret_cast<Lanes>(right << 16));
            add_input(k + 1, reinterpret_cast<Lanes>(left & 0xffff0000), reinterpret_cast<Lanes>(right & 0xffff0000));
        }
        if (K % 2) add_input(K - 1, reinterpret_cast<Lanes>(pairs[0] << 16), reinterpret_cast<Lanes>(pairs[1] << 16));
    } else {
        for (int64_t k = 0; k < K; k++)
            add_input(k, load_lanes(panel + k * WIDTH), load_lanes(panel + k * WIDTH + LANES));
    }
#endif
    for (int64_t r = 0; r < rows; r++, out += N) {
        float row[WIDTH];
        Value values[WIDTH];
        std::memcpy(row, sums[r], sizeof row);
        for (int64_t i = 0; added.bias && i < WIDTH; i++) row[i] += added.bias[i];
        for (int64_t i = 0; i < WIDTH; i++) values[i] = row[i];
        for (int64_t i = 0; added.residual && i < WIDTH; i++) values[i] = values[i] + added.residual[r * N + i];
        std::memcpy(out, values, sizeof values);
    }
}

// Multiply `count` rows, at most `most`, as one tile.
template <int64_t most, typename Number>
static void multiply_rows(int64_t count, const Value* x, const Number* panel, Added added, Value* out, int64_t K, int64_t N) {
    if (count == most)
        multiply_tile<most>(x, panel, added, out, K, N);
    else if constexpr (most > 1)
        multiply_rows<most - 1>(count, x, panel, added, out, K, N);
}

// Multiply any number of rows as tiles of about the same size, because small ones are slow.
template <typename Number>
static void multiply_panel(const Value* x, const Number* panel, Added added, Value* out, int64_t T, int64_t K, int64_t N) {
    int64_t t = 0;
    for (int64_t tiles = (T + ROWS - 1) / ROWS; tiles > 0; tiles--) {
        const int64_t count = (T - t + tiles - 1) / tiles;
        const Added here = {added.bias, added.residual ? added.residual + t * N : nullptr};
        multiply_rows<ROWS>(count, x + t * K, panel, here, out + t * N, K, N);
        t += count;
    }
}

// Compute x W^T + bias + residual: x [T, K], panels of W -> out [T, N].
template <typename Number>
static void multiply(const Value* x, const Number* panels, Added added, Value* out, int64_t T, int64_t K, int64_t N) {
    constexpr int64_t AT_ONCE = 96;  // rows that stay in a core's cache while panels pass
    const int64_t inputs = std::is_same_v<Number, Bfloat16> ? K + K % 2 : K;  // that a panel has
#pragma omp parallel for collapse(2) schedule(dynamic, 2) if (T * K * N > 65536)
    for (int64_t t = 0; t < T; t += AT_ONCE)
        for (int64_t n = 0; n < N; n += WIDTH) {
            const int64_t count = std::min(AT_ONCE, T - t);
            const Number* panel = panels + n * inputs;
            const Added here = {added.bias ? added.bias + n : nullptr,
                                added.residual ? added.residual + t * N + n : nullptr};
            multiply_panel(x + t * K, panel, here, out + t * N + n, count, K, N);
        }
}

static void multiply_any(Kind kind, const Value* x, const void* panels, Added added, Value* out, int64_t T, int64_t K,
                         int64_t N) {
    if (kind == BFLOAT16 || std::is_same_v<Value, Bfloat16>)
        multiply(x, static_cast<const Bfloat16*>(panels), added, out, T, K, N);
    else if (kind == FLOAT16)
        multiply(x, static_cast<const Float16*>(panels), added, out, T, K, N);
    else
        multiply(x, static_cast<const float*>(panels), added, out, T, K, N);
}

extern "C" void linear(const Value* x, const void* panels, const Value* bias, Value* out, int64_t T, int64_t K, int64_t N,
                       int64_t kind) {
    multiply_any(static_cast<Kind>(kind), x, panels, {bias, nullptr}, out, T, K, N);
}

// Scale x [n] to a root mean square of 1 and multiply it by weight [n]. `out` may be `x`.
static void norm_row(const Value* x, const Value* weight, Value* out, int64_t n, float eps) {
    const float scale = 1 / std::sqrt(dot(x, x, n) / n + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// Norm each row: x [T, N] -> out [T, N].
extern "C" void rms_norm(const Value* x, const Value* weight, Value* out, int64_t T, int64_t N, float eps) {
#pragma omp parallel for if (T * N > 4096)
    for (int64_t t = 0; t < T; t++) norm_row(x + t * N, weight, out + t * N, N, eps);
}

// Compute silu(gate) * up, where a row of x holds gate and then up: x [T, 2F] -> out [T, F].
extern "C" void silu_and_mul(const Value* x, Value* out, int64_t T, int64_t F) {
#pragma omp parallel for if (T * F > 4096)
    for (int64_t t = 0; t < T; t++) {
        const Value *gate = x + t * 2 * F, *up = gate + F;
        Value* row = out + t * F;
#pragma omp simd
        for (int64_t i = 0; i < F; i++) row[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
    }
}

// Norm q and k (where there are weights) and rotate them, in place in qkv [T, H + 2G, D]. Store k and v in the caches, but
// not those of a token whose slot is -1.
extern "C" void qk_norm_rope_store(
    Value* qkv, const Value* q_weight, const Value* k_weight, const float* cos_sin, const int64_t* positions,
    const int64_t* slots, Value* k_cache, Value* v_cache, int64_t T, int64_t H, int64_t G, int64_t D, float eps) {
    const int64_t half = D / 2;
#pragma omp parallel for if (T * (H + G) * D > 4096)
    for (int64_t t = 0; t < T; t++) {
        Value* heads = qkv + t * (H + 2 * G) * D;
        const float *cos = cos_sin + positions[t] * D, *sin = cos + half;
        for (int64_t h = 0; h < H + G; h++) {
            Value *x1 = heads + h * D, *x2 = x1 + half;
            if (q_weight) norm_row(x1, h < H ? q_weight : k_weight, x1, D, eps);
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = x1[i], b = x2[i];
                x1[i] = a * cos[i] - b * sin[i];
                x2[i] = b * cos[i] + a * sin[i];
            }
        }
        if (k_cache && slots[t] >= 0) {
            const Value *k = heads + H * D, *v = k + G * D;
            std::copy(k, v, k_cache + slots[t] * G * D);
            std::copy(v, v + G * D, v_cache + slots[t] * G * D);
        }
    }
}

// Decode FP8 codes (e4m3) [n].
static void decode_codes(const uint8_t* codes, float* out, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        // Exponent and mantissa lie side by side in float, too, whose exponents are 120 higher.
        const int32_t code = codes[i], size = code & 127;
        union { int32_t bits; float value; } normal = {(size << 20) + (120 << 23)};
        const float value = size < 8 ? size * 0.001953125f : normal.value;
        out[i] = code & 128 ? -value : value;
    }
}

// K or V of neighbouring tokens for one KV head: D numbers each, `stride` apart.
struct Numbers {
    const float* first;
    int64_t stride;
};

// Return the numbers of `count` tokens: those of a float cache, or decoded into `space`.
static inline Numbers numbers(const float* tokens, int64_t count, int64_t stride, float* space, int64_t D) {
    return {tokens, stride};
}
static inline Numbers numbers(const Bfloat16* tokens, int64_t count, int64_t stride, float* space, int64_t D) {
    for (int64_t t = 0; t < count; t++) std::copy_n(tokens + t * stride, D, space + t * D);
    return {space, D};
}
static inline Numbers numbers(const uint8_t* tokens, int64_t count, int64_t stride, float* space, int64_t D) {
    for (int64_t t = 0; t < count; t++) decode_codes(tokens + t * stride, space + t * D, D);
    return {space, D};
}

// Add weight * v of `count` tokens to sums [D]. Some columns at a time stay in registers.
template <int64_t DIM>
static void add_values(const float* weights, Numbers v, int64_t count, float* sums, int64_t any_dim) {
    if constexpr (DIM > 0) {
        constexpr int64_t COLUMNS = 64;
        for (int64_t c = 0; c < DIM; c += COLUMNS) {
            Lanes parts[COLUMNS / LANES];
            std::memcpy(parts, sums + c, sizeof parts);
            for (int64_t t = 0; t < count; t++)
                for (int64_t i = 0; i < COLUMNS / LANES; i++)
                    parts[i] += weights[t] * load_lanes(v.first + t * v.stride + c + i * LANES);
            std::memcpy(sums + c, parts, sizeof parts);
        }
    } else {
        for (int64_t t = 0; t < count; t++) {
            const float* value = v.first + t * v.stride;
#pragma omp simd
            for (int64_t i = 0; i < any_dim; i++) sums[i] += weights[t] * value[i];
        }
    }
}

// Attend with the queries of `groups` neighbouring KV heads of one sequence, `heads` of each, to its tokens [first, end). The
// memory of the KV heads is read once, in the order in which it lies. A score s becomes softcap tanh(s / softcap) unless
// softcap is 0. Where there are sinks, each head has one more score, of a token that does not exist. Stored is Value, or
// uint8_t for FP8 codes; v_scale multiplies the result, as the caller's scale does the scores. DIM is the head size where it
// is a constant, so that loops over it compile to straight vector code, and 0 where the head size is known only at run time.
template <int64_t DIM, typename Stored>
static void attend(const Value* query, const Stored* k_cache, const Stored* v_cache, const int32_t* table, int64_t first,
                   int64_t end, int64_t groups, int64_t heads, int64_t G, int64_t any_dim, int64_t block_size, float scale,
                   float v_scale, float softcap, const Value* sinks, Value* out) {
    const int64_t D = DIM ? DIM : any_dim, len = end - first;
    constexpr int64_t AT_ONCE = 16;  // tokens that stay in a core's smallest cache while its heads pass
    static thread_local std::vector<float> space, queries, sums;
    space.resize(AT_ONCE * D);
    queries.assign(query, query + groups * heads * D);
    sums.assign(groups * heads * D, 0);
    // Calls use(h, t, count, K or V of `count` tokens from first + t on) for each head.
    auto for_each_head = [&](const Stored* cache, auto use) {
        for (int64_t start = first, stop; start < end; start = stop) {
            stop = std::min({(start / block_size + 1) * block_size, start + AT_ONCE, end});
            const Stored* tokens = cache + (table[start / block_size] * block_size + start % block_size) * G * D;
            for (int64_t g = 0; g < groups; g++) {
                const Numbers of_tokens = numbers(tokens + g * D, stop - start, G * D, space.data(), D);
                for (int64_t h = g * heads; h < (g + 1) * heads; h++) use(h, start - first, stop - start, of_tokens);
            }
        }
    };
    static thread_local std::vector<float> of_thread;
    of_thread.resize(groups * heads * len);
    float* weights = of_thread.data();
    for_each_head(k_cache, [&](int64_t h, int64_t from, int64_t count, Numbers k) {
        for (int64_t t = 0; t < count; t++)
            weights[h * len + from + t] = scale * dot(&queries[h * D], k.first + t * k.stride, D);
    });
    for (int64_t h = 0; h < groups * heads; h++) {
        float* row = weights + h * len;
        int32_t is_wrong = 0;  // whether a score is NaN or infinite: then the output is NaN
#pragma omp simd reduction(| : is_wrong)
        for (int64_t t = 0; t < len; t++) is_wrong |= (bits_of(row[t]) & INT32_MAX) >= INFINITE;
        if (softcap > 0) {
#pragma omp simd
            for (int64_t t = 0; t < len; t++) row[t] = softcap * (1 - 2 / (1 + exponential(2 * row[t] / softcap)));
        }
        float peak = row[0], total = 0;
#pragma omp simd reduction(max : peak)
        for (int64_t t = 0; t < len; t++) peak = std::max(peak, row[t]);
        if (sinks) {
            peak = std::max<float>(peak, sinks[h]);
            total = exponential(sinks[h] - peak);
        }
#pragma omp simd reduction(+ : total)
        for (int64_t t = 0; t < len; t++) total += row[t] = exponential(row[t] - peak);
        total = is_wrong ? float_of(NAN_BITS) : total / v_scale;
#pragma omp simd
        for (int64_t t = 0; t < len; t++) row[t] /= total;
    }
    for_each_head(v_cache, [&](int64_t h, int64_t from, int64_t count, Numbers v) {
        add_values<DIM>(weights + h * len + from, v, count, &sums[h * D], D);
    });
    std::copy(sums.begin(), sums.end(), out);
}

template <typename Stored>
static void decode_all(
    const Value* q, const Stored* k_cache, const Stored* v_cache, const int32_t* lens, const int32_t* tables,
    const Value* sinks, Value* out, int64_t B, int64_t q_stride, int64_t H, int64_t G, int64_t D, int64_t W,
    int64_t block_size, int64_t window, float scale, float v_scale, float softcap) {
    const int64_t heads = H / G;
    const int64_t groups = B > 8 ? G : 1;  // KV heads of a sequence that one thread takes: they are neighbours in memory
    const auto attend_dim = D == 64 ? attend<64, Stored> : D == 128 ? attend<128, Stored> : attend<0, Stored>;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < B; b++)
        for (int64_t g = 0; g < G; g += groups)
            attend_dim(q + b * q_stride + g * heads * D, k_cache + g * D, v_cache + g * D, tables + b * W,
                       std::max<int64_t>(0, lens[b] - window), lens[b], groups, heads, G, D, block_size, scale, v_scale,
                       softcap, sinks ? sinks + g * heads : nullptr, out + (b * H + g * heads) * D);
}

// Attend with one query a sequence: q [B, H, D] with rows q_stride apart, caches [blocks, block_size, G, D], tables [B, W]
// -> out [B, H, D]. Where there are scales, of K and of V, the caches hold FP8 codes.
extern "C" void decode_attention(
    const Value* q, const void* k_cache, const void* v_cache, const float* scales, const int32_t* lens,
    const int32_t* tables, const Value* sinks, Value* out, int64_t B, int64_t q_stride, int64_t H, int64_t G, int64_t D,
    int64_t W, int64_t block_size, int64_t window, float scale, float softcap) {
    if (scales)
        decode_all(q, static_cast<const uint8_t*>(k_cache), static_cast<const uint8_t*>(v_cache), lens, tables, sinks, out,
                   B, q_stride, H, G, D, W, block_size, window, scale * scales[0], scales[1], softcap);
    else
        decode_all(q, static_cast<const Value*>(k_cache), static_cast<const Value*>(v_cache), lens, tables, sinks, out, B,
                   q_stride, H, G, D, W, block_size, window, scale, 1.0f, softcap);
}

// An integer of the bits of a float. Integers are in the order of the floats, and 0 is equal to -0. The compiler, which takes
// no float for a NaN or an infinity, cannot take these for anything else.
static inline int32_t order_of(int32_t bits) {
    const int32_t order = bits ^ ((bits >> 31) & INT32_MAX);  // those of negative floats grow downwards: turn them round
    return order + (order == -1);
}

// Find the largest of the logits [B, V] of each row, given by their bits: its value, and the first place where it stands. A
// row whose largest is not finite, or that has a NaN, gets the place -1; its value is infinity, or -infinity if all are that.
extern "C" void arg_max(const int32_t* logits, int64_t* tokens, int32_t* values, int64_t B, int64_t V) {
    constexpr int64_t AT_ONCE = 512;
#pragma omp parallel for if (B * V > 65536)
    for (int64_t b = 0; b < B; b++) {
        const int32_t* row = logits + b * V;
        int32_t largest = INT32_MIN, has_nan = 0;
        int64_t place = 0;  // at first that of AT_ONCE logits, the first among which the largest is
        for (int64_t from = 0; from < V; from += AT_ONCE) {
            const int64_t to = std::min(from + AT_ONCE, V);
            int32_t peak = INT32_MIN;
#pragma omp simd reduction(max : peak) reduction(| : has_nan)
            for (int64_t i = from; i < to; i++) {
                peak = std::max(peak, order_of(row[i]));
                has_nan |= (row[i] & INT32_MAX) > INFINITE;
            }
            if (peak > largest) {
                largest = peak;
                place = from;
            }
        }
        while (order_of(row[place]) != largest) place++;
        const bool is_finite = !has_nan && (row[place] & INFINITE) != INFINITE;
        tokens[b] = is_finite ? place : -1;
        values[b] = has_nan ? INFINITE : row[place];
    }
}

// ---- a decoder ----

// The kernels of quantised_ops.cpp, or null where no weight needs them, as no Value does that is not a float.
struct QuantisedKernels {
    void (*int8_linear)(const Value*, const int8_t*, const float*, const Value*, Value*, int64_t, int64_t, int64_t);
    void (*grouped_linear)(const Value*, const uint32_t*, const float*, const uint8_t*, const Value*, Value*, int64_t, int64_t,
                           int64_t, int64_t, int64_t);
};

// A linear layer: see Linear in decoder.py. What its kind does not need is 0.
struct Linear {
    const void* weights;
    const float* scales;
    const uint8_t* zeros;
    const Value* bias;
    int64_t kind, bits, group;
};

// A layer with its part of the KV cache: see Layer in decoder.py.
struct Layer {
    Linear qkv, o, gate_up, down;
    const Value *input_norm, *post_norm, *q_norm, *k_norm;
    const float* cos_sin;
    const Value* sinks;
    Value *k_cache, *v_cache;
    int64_t hidden, heads, kv_heads, head_dim, intermediate, window;
    float input_eps, post_eps, qk_eps, scale, softcap;
};

// Run one token of each of B sequences through all layers, in place: x [B, hidden].
extern "C" void decode(const QuantisedKernels* quantised, const Layer* layers, int64_t count, Value* x,
                       const int64_t* positions, const int64_t* slots, const int32_t* lens, const int32_t* tables,
                       int64_t B, int64_t W, int64_t block_size) {
    std::vector<Value> normed, heads, attended, both, activated, added;
    auto project = [&](const Linear& linear, const Value* from, Value* to, int64_t K, int64_t N) {
        if (linear.kind == INT8)
            quantised->int8_linear(from, static_cast<const int8_t*>(linear.weights), linear.scales, linear.bias, to, B, K, N);
        else if (linear.kind == GROUPED)
            quantised->grouped_linear(from, static_cast<const uint32_t*>(linear.weights), linear.scales, linear.zeros,
                                      linear.bias, to, B, K, N, linear.bits, linear.group);
        else
            multiply_any(static_cast<Kind>(linear.kind), from, linear.weights, {linear.bias, nullptr}, to, B, K, N);
    };
    auto project_and_add = [&](const Linear& linear, const Value* from, int64_t K, int64_t N) {
        if (linear.kind != INT8 && linear.kind != GROUPED) {
            multiply_any(static_cast<Kind>(linear.kind), from, linear.weights, {linear.bias, x}, x, B, K, N);
            return;
        }
        project(linear, from, added.data(), K, N);
        for (int64_t i = 0; i < B * N; i++) x[i] = x[i] + added[i];
    };
    for (const Layer* layer = layers; layer < layers + count; layer++) {
        const int64_t hidden = layer->hidden, H = layer->heads, G = layer->kv_heads, D = layer->head_dim;
        const int64_t F = layer->intermediate, width = (H + 2 * G) * D;
        normed.resize(B * hidden);
        added.resize(B * hidden);
        heads.resize(B * width);
        attended.resize(B * H * D);
        both.resize(B * 2 * F);
        activated.resize(B * F);

        rms_norm(x, layer->input_norm, normed.data(), B, hidden, layer->input_eps);
        project(layer->qkv, normed.data(), heads.data(), hidden, width);
        qk_norm_rope_store(heads.data(), layer->q_norm, layer->k_norm, layer->cos_sin, positions, slots, layer->k_cache,
                           layer->v_cache, B, H, G, D, layer->qk_eps);
        decode_attention(heads.data(), layer->k_cache, layer->v_cache, nullptr, lens, tables, layer->sinks, attended.data(),
                         B, width, H, G, D, W, block_size, layer->window, layer->scale, layer->softcap);
        project_and_add(layer->o, attended.data(), H * D, hidden);
        rms_norm(x, layer->post_norm, normed.data(), B, hidden, layer->post_eps);
        project(layer->gate_up, normed.data(), both.data(), hidden, 2 * F);
        silu_and_mul(both.data(), activated.data(), B, F);
        project_and_add(layer->down, activated.data(), F, hidden);
    }
}
