// The kernels of quantised.py: products with weights of few bits, which are read once for all tokens of a step.
//
// T tokens, K inputs, N outputs. Weights lie in blocks of BLOCK outputs, so that a vector holds numbers of neighbouring
// outputs and each sum stays in its lane. Each token's sums are computed alone and in one order, so a token's result
// depends neither on the other tokens nor on their number.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int64_t BLOCK = 16;

// ---- int8 weights [N / BLOCK, K / 4, BLOCK, 4] and int8 inputs in groups ----
//
// A step of the inner loop takes 4 inputs of a token and the weights of LANES outputs for them, and adds each output's 4
// products to its sum. Codes are from -127 to 127. Sums of a group are integers, and exact.

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)

constexpr int64_t LANES = 8, ROWS = 4;
typedef __m256i Sums;
constexpr int32_t OFFSET = 0;

struct Weights {
    __m256i codes, sizes;
};

static inline Weights load(const int8_t* codes) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    return {w, _mm256_abs_epi8(w)};
}

// |w| times x with the sign of w: two products fit 16 bits, because 2 * 127 * 127 < 2^15.
static inline Sums add_products(Sums sums, const Weights& w, int32_t x) {
    const __m256i signed_x = _mm256_sign_epi8(_mm256_set1_epi32(x), w.codes);
    const __m256i pairs = _mm256_maddubs_epi16(w.sizes, signed_x);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#else

// VNNI multiplies unsigned by signed codes. So weights are taken as code + 128, and the sums are too large by OFFSET times
// the sum of the inputs. Elsewhere plain C++ computes what VNNI computes.
constexpr int32_t OFFSET = 128;
#if defined(__AVX512VNNI__) || !defined(__AVXVNNI__)
constexpr int64_t LANES = 16, ROWS = 8;
#else
constexpr int64_t LANES = 8, ROWS = 4;
#endif
typedef int32_t Sums __attribute__((vector_size(4 * LANES)));
typedef uint8_t Weights __attribute__((vector_size(4 * LANES)));

static inline Weights load(const int8_t* codes) {
    Weights w;
    std::memcpy(&w, codes, sizeof w);
    return w ^ 128;
}

static inline Sums add_products(Sums sums, const Weights& w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(x));
#else
    int8_t codes[4];
    std::memcpy(codes, &x, 4);
    for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t i = 0; i < 4; i++) sums[lane] += w[4 * lane + i] * codes[i];
    return sums;
#endif
}

#endif

typedef float Products __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
constexpr int64_t GROUP = 32;  // inputs that share a scale

// Inputs that were quantised: codes [T, groups, GROUP], with zeros after the last input. Number = code * scale.
struct Inputs {
    int64_t T, groups;
    std::vector<int8_t> codes;
    std::vector<float> scales;    // [T, groups]
    std::vector<int32_t> excess;  // [T, groups], by which sums are too large

    void resize(int64_t tokens, int64_t K) {
        T = tokens;
        groups = (K + GROUP - 1) / GROUP;
        codes.resize(T * groups * GROUP);
        scales.resize(T * groups);
        excess.resize(T * groups);
    }
};

// Round n numbers of group g, counted over all tokens, to codes, where 127 stands for the largest. If one is NaN or
// infinite, so is the scale: bits of floats above 0 are in the order of the floats, and those of NaN are above all.
static void quantise_group(const float* x, int64_t n, int64_t g, Inputs& inputs) {
    float numbers[GROUP] = {};
    std::memcpy(numbers, x, n * sizeof *x);
    float largest = 1e-12f;
    int32_t bits[GROUP], most;
    std::memcpy(bits, numbers, sizeof bits);
    std::memcpy(&most, &largest, sizeof most);
    for (int64_t i = 0; i < GROUP; i++) most = std::max(most, bits[i] & INT32_MAX);
    std::memcpy(&largest, &most, sizeof largest);
    const float scale = largest / 127.0f;
    int8_t* codes = inputs.codes.data() + g * GROUP;
    int32_t sum = 0;
    for (int64_t i = 0; i < GROUP; i++) {
        const int32_t code = std::min(std::max(std::nearbyint(numbers[i] / scale), -127.0f), 127.0f);
        codes[i] = code;
        sum += code;
    }
    inputs.scales[g] = scale;
    inputs.excess[g] = OFFSET * sum;
}

static void quantise_row(const float* x, int64_t K, int64_t t, Inputs& inputs) {
    for (int64_t g = 0; g < inputs.groups; g++)
        quantise_group(x + g * GROUP, std::min(GROUP, K - g * GROUP), t * inputs.groups + g, inputs);
}

// Multiply COUNT tokens from t on by a block of weights, and write the `outputs` first of its outputs.
template <int64_t COUNT>
static void multiply_tile(const int8_t* weights, const float* scales, const float* bias, const Inputs& inputs, int64_t t,
                          int64_t outputs, float* out, int64_t N) {
    constexpr int64_t VECTORS = BLOCK / LANES;
    Products totals[COUNT][VECTORS] = {};
    const int8_t* codes = inputs.codes.data() + t * inputs.groups * GROUP;
    for (int64_t g = 0; g < inputs.groups; g++) {
        Sums sums[COUNT][VECTORS] = {};
        for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k += 4) {
            Weights w[VECTORS];
            for (int64_t v = 0; v < VECTORS; v++) w[v] = load(weights + k * BLOCK + v * 4 * LANES);
            for (int64_t i = 0; i < COUNT; i++) {
                int32_t x;
                std::memcpy(&x, codes + i * inputs.groups * GROUP + k, 4);
                for (int64_t v = 0; v < VECTORS; v++) sums[i][v] = add_products(sums[i][v], w[v], x);
            }
        }
        for (int64_t i = 0; i < COUNT; i++) {
            const int64_t at = (t + i) * inputs.groups + g;
            for (int64_t v = 0; v < VECTORS; v++)
                totals[i][v] += __builtin_convertvector((Integers)sums[i][v] - inputs.excess[at], Products) *
                                inputs.scales[at];
        }
    }
    for (int64_t i = 0; i < COUNT; i++) {
        float products[BLOCK];
        std::memcpy(products, totals[i], sizeof products);
        float* row = out + (t + i) * N;
        for (int64_t n = 0; n < outputs; n++) row[n] = products[n] * scales[n] + (bias ? bias[n] : 0);
    }
}

// Multiply all tokens by a block of weights.
static void multiply_block(const int8_t* weights, const float* scales, const float* bias, const Inputs& inputs,
                           int64_t outputs, float* out, int64_t N) {
    int64_t t = 0;
    for (; t + ROWS <= inputs.T; t += ROWS) multiply_tile<ROWS>(weights, scales, bias, inputs, t, outputs, out, N);
    for (; t + 2 <= inputs.T; t += 2) multiply_tile<2>(weights, scales, bias, inputs, t, outputs, out, N);
    if (t < inputs.T) multiply_tile<1>(weights, scales, bias, inputs, t, outputs, out, N);
}

// Quantise x [T, K] and multiply it by weights with a scale for each output: -> out [T, N].
extern "C" void int8_linear(const float* x, const int8_t* weights, const float* scales, const float* bias, float* out,
                            int64_t T, int64_t K, int64_t N) {
    static thread_local Inputs of_thread;
    Inputs& inputs = of_thread;  // of the calling thread, for all threads
    inputs.resize(T, K);
#pragma omp parallel for if (T * K > 8192)
    for (int64_t t = 0; t < T; t++) quantise_row(x + t * K, K, t, inputs);
#pragma omp parallel for if (T * K * N > 65536)
    for (int64_t n = 0; n < N; n += BLOCK)
        multiply_block(weights + n * inputs.groups * GROUP, scales + n, bias ? bias + n : nullptr, inputs,
                       std::min(BLOCK, N - n), out + n, N);
}

// ---- integer weights with groups, [N / WIDE, K / PER_WORD, WIDE] words, and float inputs ----
//
// A word holds the codes of neighbouring inputs, the first in its lowest bits. A code is taken out of its word by a mask
// alone, so it is too large by a power of 2, and its input is multiplied by the inverse beforehand: both are exact.

constexpr int64_t WIDE = 32;

#if defined(__AVX512F__) || !defined(__AVX2__)
constexpr int64_t WIDTH = 16;  // of a vector
constexpr int64_t ROWS_OF_FLOATS = 8;
#else
constexpr int64_t WIDTH = 8;
constexpr int64_t ROWS_OF_FLOATS = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Codes __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

template <typename Vector>
static inline Vector load_vector(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

static inline Floats broadcast(float x) { return x - Floats{}; }

// A weight in groups of `group` words of inputs. Number = (code - zero) * scale; zero is 2^(bits - 1) where `zeros` is null.
struct Grouped {
    const uint32_t* words;  // [words, WIDE], of a block of outputs
    const float* scales;    // [groups, WIDE]
    const uint8_t* zeros;   // [groups, WIDE]
    int64_t count, group, groups;
};

// Inputs for such a weight: `numbers` [T, words * codes of a word], multiplied as the codes need it, and `sums` [T, groups].
struct Scaled {
    std::vector<float> numbers, sums;
    int64_t width, groups;
};

template <int BITS>
static void scale_row(const float* x, int64_t K, int64_t group, int64_t t, Scaled& scaled) {
    constexpr int64_t PER_WORD = 32 / BITS;
    float *numbers = scaled.numbers.data() + t * scaled.width, *sums = scaled.sums.data() + t * scaled.groups;
    for (int64_t g = 0; g < scaled.groups; g++) {
        float sum = 0;
        for (int64_t k = g * group * PER_WORD; k < std::min((g + 1) * group * PER_WORD, K); k++) sum += x[k];
        sums[g] = sum;
    }
    float factors[PER_WORD];
    for (int64_t i = 0; i < PER_WORD; i++) factors[i] = i == PER_WORD - 1 ? 1.0f : 1.0f / (1 << BITS * i);
    for (int64_t k = 0; k < scaled.width; k++) numbers[k] = k < K ? x[k] * factors[k % PER_WORD] : 0;
}

// Multiply COUNT tokens from t on by VECTORS vectors of outputs, from `first` on, of a block.
template <int BITS, int64_t COUNT, int64_t VECTORS>
static void multiply_words(const Grouped& weight, const Scaled& scaled, int64_t t, int64_t first, float* out) {
    constexpr int64_t PER_WORD = 32 / BITS;
    const float* x = scaled.numbers.data() + t * scaled.width;
    Floats totals[COUNT][VECTORS] = {};
    for (int64_t g = 0; g < weight.groups; g++) {
        Floats sums[COUNT][VECTORS] = {};
        for (int64_t w = g * weight.group; w < std::min((g + 1) * weight.group, weight.count); w++) {
            Words words[VECTORS];
            for (int64_t v = 0; v < VECTORS; v++)
                words[v] = load_vector<Words>(weight.words + w * WIDE + first + v * WIDTH);
#pragma GCC unroll 8
            for (int64_t j = 0; j < PER_WORD; j++) {
                Floats codes[VECTORS];
                for (int64_t v = 0; v < VECTORS; v++) {
                    const Words code = j == PER_WORD - 1 ? words[v] >> (32 - BITS)
                                                         : words[v] & (((1u << BITS) - 1) << BITS * j);
                    // Codes are counted from their middle, so that little cancels out in sums.
                    const float middle = (1 << (BITS - 1)) * (j == PER_WORD - 1 ? 1.0f : 1 << BITS * j);
                    codes[v] = __builtin_convertvector((Codes)code, Floats) - middle;
                }
                for (int64_t i = 0; i < COUNT; i++) {
                    const Floats input = broadcast(x[i * scaled.width + w * PER_WORD + j]);
                    for (int64_t v = 0; v < VECTORS; v++) sums[i][v] = multiply_add(codes[v], input, sums[i][v]);
                }
            }
        }
        for (int64_t v = 0; v < VECTORS; v++) {
            const int64_t at = g * WIDE + first + v * WIDTH;
            const Floats scale = load_vector<Floats>(weight.scales + at);
            if (weight.zeros) {
                const Floats zero = __builtin_convertvector(load_vector<Bytes>(weight.zeros + at), Floats);
                for (int64_t i = 0; i < COUNT; i++) {
                    const Floats sum = broadcast(scaled.sums[(t + i) * scaled.groups + g]);
                    sums[i][v] = multiply_add(broadcast(1 << (BITS - 1)) - zero, sum, sums[i][v]);
                }
            }
            for (int64_t i = 0; i < COUNT; i++) totals[i][v] = multiply_add(scale, sums[i][v], totals[i][v]);
        }
    }
    for (int64_t i = 0; i < COUNT; i++) std::memcpy(out + i * WIDE + first, totals[i], sizeof totals[i]);
}

// Multiply COUNT tokens from t on by a block of outputs, and write the `outputs` first of them to rows of `out`, N apart.
template <int BITS, int64_t COUNT>
static void multiply_rows(const Grouped& weight, const Scaled& scaled, int64_t t, const float* bias, int64_t outputs,
                          float* out, int64_t N) {
    // Enough sums at a time to hide how long one takes, and no more than there are registers for.
    constexpr int64_t VECTORS = COUNT == 1 ? WIDE / WIDTH : 2;
    float results[COUNT * WIDE];
    for (int64_t first = 0; first < WIDE; first += VECTORS * WIDTH)
        multiply_words<BITS, COUNT, VECTORS>(weight, scaled, t, first, results);
    for (int64_t i = 0; i < COUNT; i++)
        for (int64_t n = 0; n < outputs; n++)
            out[(t + i) * N + n] = bias ? results[i * WIDE + n] + bias[n] : results[i * WIDE + n];
}

template <int BITS>
static void multiply_grouped(const float* x, const uint32_t* words, const float* scales, const uint8_t* zeros,
                             const float* bias, float* out, int64_t T, int64_t K, int64_t N, int64_t group) {
    constexpr int64_t PER_WORD = 32 / BITS;
    const int64_t count = (K + PER_WORD - 1) / PER_WORD, groups = (count + group - 1) / group;
    static thread_local Scaled of_thread;
    Scaled& scaled = of_thread;  // of the calling thread, for all threads
    scaled.width = count * PER_WORD;
    scaled.groups = groups;
    scaled.numbers.resize(T * scaled.width);
    scaled.sums.resize(T * groups);
#pragma omp parallel for if (T * K > 8192)
    for (int64_t t = 0; t < T; t++) scale_row<BITS>(x + t * K, K, group, t, scaled);
#pragma omp parallel for if (T * K * N > 65536)
    for (int64_t n = 0; n < N; n += WIDE) {
        const int64_t outputs = std::min(WIDE, N - n);
        const Grouped weight = {words + n * count, scales + n * groups, zeros ? zeros + n * groups : nullptr, count, group,
                                groups};
        const float* of_block = bias ? bias + n : nullptr;
        int64_t t = 0;
        for (; t + ROWS_OF_FLOATS <= T; t += ROWS_OF_FLOATS)
            multiply_rows<BITS, ROWS_OF_FLOATS>(weight, scaled, t, of_block, outputs, out + n, N);
        for (; t + 2 <= T; t += 2) multiply_rows<BITS, 2>(weight, scaled, t, of_block, outputs, out + n, N);
        if (t < T) multiply_rows<BITS, 1>(weight, scaled, t, of_block, outputs, out + n, N);
    }
}

// Multiply x [T, K] by integers of 4 or 8 bits, in groups of `group` words of a row: -> out [T, N].
extern "C" void grouped_linear(const float* x, const uint32_t* words, const float* scales, const uint8_t* zeros,
                               const float* bias, float* out, int64_t T, int64_t K, int64_t N, int64_t bits,
                               int64_t group) {
    (bits == 4 ? multiply_grouped<4> : multiply_grouped<8>)(x, words, scales, zeros, bias, out, T, K, N, group);
}
