/* What the forward pass does besides matrix products, on a CPU: each function is one pass over memory that torch makes
 * in several. Compiled for one number format: float32, or bfloat16 with -DBFLOAT16; all is computed in float32.
 * `compiled.py` compiles this file and says what is passed; `kernels.py` says what is computed. */

#include <stdint.h>
#include <string.h>

#define WIDTH 16 /* numbers that are worked on together */
#define FEW 8192 /* numbers that one thread is done with before another has begun */

typedef float vector __attribute__((vector_size(4 * WIDTH)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t integers __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));

#define INLINE static inline __attribute__((always_inline))

#ifdef BFLOAT16

typedef uint16_t number;

INLINE vector load(const number *from)
{
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (vector)(__builtin_convertvector(bits, words) << 16);
}

/* Rounds to the nearest, ties to even; a NaN stays one. */
INLINE void store(number *to, vector v)
{
    words bits = (words)v;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_number = (words)(v == v);
    halves found = __builtin_convertvector((rounded & is_number) | (0x7fc0 & ~is_number), halves);
    memcpy(to, &found, sizeof found);
}

INLINE float load_one(number from)
{
    uint32_t bits = (uint32_t)from << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE number store_one(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? (number)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : (number)0x7fc0;
}

#else

typedef float number;

INLINE vector load(const number *from)
{
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(number *to, vector v) { memcpy(to, &v, sizeof v); }
INLINE float load_one(number from) { return from; }
INLINE number store_one(float value) { return value; }

#endif

INLINE vector all(float value) { return value - (vector){0}; }

INLINE float sum_of(vector v)
{
    eight halved[2];
    four quartered[2];
    memcpy(halved, &v, sizeof v);
    halved[0] += halved[1];
    memcpy(quartered, halved, sizeof quartered);
    quartered[0] += quartered[1];
    return quartered[0][0] + quartered[0][1] + (quartered[0][2] + quartered[0][3]);
}

INLINE float largest_of(vector v)
{
    float largest = v[0];
    for (int i = 1; i < WIDTH; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

INLINE vector choose(integers condition, vector yes, vector no)
{
    return (vector)(((integers)yes & condition) | ((integers)no & ~condition));
}

/* e to the power of x, to about 2e-7 of its value; 0 below -87, infinite above 88, NaN of NaN. 2^n * e^r, where |r| is at most ln(2) / 2,
 * and e^r is its Taylor polynomial. */
INLINE vector exponential(vector x)
{
    integers too_small = x < -87.0f, too_large = x > 88.0f;
    x = choose(too_small | too_large, all(0.0f), x);
    vector shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: n are its lowest bits */
    vector n = shifted - 12582912.0f;
    vector r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln(2) in two parts */
    vector p = all(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vector power = (vector)(((integers)shifted << 23) + (127 << 23));
    return choose(too_large, all(__builtin_inff()), choose(too_small, all(0.0f), p * power));
}

/* --- Attention of one new token for each slot --------------------------------------------------------------------- */

#define MOST_QUERIES 8 /* query heads that are computed together with the keys and values that they share */
#define MOST_VECTORS 16
#define BLOCK 64       /* tokens, a multiple of WIDTH */

/* `count` queries over `length` tokens, block by block with the softmax of what was seen so far (Milakov and
 * Gimelshein, 2018). `vectors`: of a head; a constant wherever this is called. */
INLINE void attend(const number *queries, int count, const number *keys, const number *values, int64_t stride,
                   int64_t length, int vectors, float scale, number *out)
{
    const int head_dim = vectors * WIDTH;
    float scores[MOST_QUERIES][BLOCK];
    float total[MOST_QUERIES], largest[MOST_QUERIES];
    vector sums[MOST_QUERIES][MOST_VECTORS];
    for (int g = 0; g < count; g++) {
        total[g] = 0;
        largest[g] = -3.0e38f;
        for (int i = 0; i < vectors; i++) sums[g][i] = all(0);
    }
    for (int64_t first = 0; first < length; first += BLOCK) {
        int tokens = length - first < BLOCK ? (int)(length - first) : BLOCK;
        int padded = (tokens + WIDTH - 1) / WIDTH * WIDTH;
        for (int g = 0; g < count; g++) {
            vector query[MOST_VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) query[i] = load(queries + g * head_dim + i * WIDTH) * scale;
            for (int t = 0; t < tokens; t++) {
                const number *key = keys + (first + t) * stride;
                vector dot = query[0] * load(key);
#pragma GCC unroll 16
                for (int i = 1; i < vectors; i++) dot += query[i] * load(key + i * WIDTH);
                scores[g][t] = sum_of(dot);
            }
            for (int t = tokens; t < padded; t++) scores[g][t] = -3.0e38f;
        }
        for (int g = 0; g < count; g++) {
            vector highest = all(largest[g]);
            for (int t = 0; t < padded; t += WIDTH) {
                vector score;
                memcpy(&score, &scores[g][t], sizeof score);
                highest = choose(score > highest, score, highest);
            }
            float now = largest_of(highest);
            vector correction = exponential(all(largest[g] - now));
            largest[g] = now;
            vector exponentials = all(0);
            for (int t = 0; t < padded; t += WIDTH) {
                vector score;
                memcpy(&score, &scores[g][t], sizeof score);
                score = exponential(score - now);
                exponentials += score;
                memcpy(&scores[g][t], &score, sizeof score);
            }
            total[g] = total[g] * correction[0] + sum_of(exponentials);
            vector sum[MOST_VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) sum[i] = sums[g][i] * correction;
            for (int t = 0; t < tokens; t++) {
                const number *value = values + (first + t) * stride;
#pragma GCC unroll 16
                for (int i = 0; i < vectors; i++) sum[i] += load(value + i * WIDTH) * scores[g][t];
            }
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) sums[g][i] = sum[i];
        }
    }
    for (int g = 0; g < count; g++)
        for (int i = 0; i < vectors; i++) store(out + g * head_dim + i * WIDTH, sums[g][i] / total[g]);
}

/* queries [slots, heads, head_dim], rows `query_stride` apart; cache [slots, tokens, 2 * kv_heads, head_dim], keys
 * first; out [slots, heads, head_dim], contiguous. head_dim is one of those below, times WIDTH. */
void attend_slots(const number *queries, int64_t query_stride, const number *cache, int64_t slot_stride,
                 int64_t token_stride, const int64_t *lengths, number *out, int64_t slots, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, float scale, int threads)
{
    int64_t group = heads / kv_heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t task = 0; task < slots * kv_heads; task++) {
        int64_t slot = task / kv_heads, head = task % kv_heads;
        const number *keys = cache + slot * slot_stride + head * head_dim;
        const number *values = keys + kv_heads * head_dim;
        for (int64_t first = 0; first < group; first += MOST_QUERIES) {
            int count = group - first < MOST_QUERIES ? (int)(group - first) : MOST_QUERIES;
            const number *query = queries + slot * query_stride + (head * group + first) * head_dim;
            number *to = out + (slot * heads + head * group + first) * head_dim;
#define CASE(n) \
    case n: attend(query, count, keys, values, token_stride, lengths[slot], n, scale, to); break;
            switch (head_dim / WIDTH) { CASE(2) CASE(4) CASE(6) CASE(8) CASE(16) }
        }
    }
}

/* --- The rest of a layer ------------------------------------------------------------------------------------------ */

/* x [rows, width] / root of its mean square * weight [width], into out. */
void rms_norm(const number *x, const number *weight, number *out, int64_t rows, int64_t width, float eps, int threads)
{
    int64_t whole = width / WIDTH * WIDTH;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row * width;
        number *to = out + row * width;
        vector squares = all(0);
        for (int64_t i = 0; i < whole; i += WIDTH) squares += load(from + i) * load(from + i);
        float square = sum_of(squares);
        for (int64_t i = whole; i < width; i++) square += load_one(from[i]) * load_one(from[i]);
        float scale = 1.0f / __builtin_sqrtf(square / (float)width + eps);
        for (int64_t i = 0; i < whole; i += WIDTH) store(to + i, load(from + i) * scale * load(weight + i));
        for (int64_t i = whole; i < width; i++) to[i] = store_one(load_one(from[i]) * scale * load_one(weight[i]));
    }
}

/* Turns the first `turned` heads of qkv [tokens, heads, head_dim] by the rotation of each token's position, and copies
 * the last `kept` heads to row rows[token] of the cache. rotation [2, positions, head_dim]: cosines, and sines with the
 * sign that exchanged halves need. head_dim / 2 is a multiple of WIDTH. */
void rotate_and_keep(number *qkv, int64_t heads, int64_t turned, int64_t kept, int64_t head_dim, const number *rotation,
                    int64_t positions, const int64_t *position, number *cache, const int64_t *rows, int64_t tokens,
                    int threads)
{
    int64_t half = head_dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * heads * head_dim > FEW)
    for (int64_t token = 0; token < tokens; token++) {
        number *row = qkv + token * heads * head_dim;
        const number *cosines = rotation + position[token] * head_dim;
        const number *sines = cosines + positions * head_dim;
        for (int64_t head = 0; head < turned; head++) {
            number *low = row + head * head_dim, *high = low + half;
            for (int64_t i = 0; i < half; i += WIDTH) {
                vector a = load(low + i), b = load(high + i);
                store(low + i, a * load(cosines + i) + b * load(sines + i));
                store(high + i, b * load(cosines + half + i) + a * load(sines + half + i));
            }
        }
        memcpy(cache + rows[token] * kept * head_dim, row + (heads - kept) * head_dim, kept * head_dim * sizeof *row);
    }
}

/* silu of the first half of each row of gate_up [rows, 2 * width], times the second half, into out [rows, width]. */
void silu_times(const number *gate_up, number *out, int64_t rows, int64_t width, int threads)
{
    int64_t whole = width / WIDTH * WIDTH;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const number *gates = gate_up + row * 2 * width, *ups = gates + width;
        number *to = out + row * width;
        for (int64_t i = 0; i < whole; i += WIDTH) {
            vector gate = load(gates + i);
            store(to + i, gate / (1.0f + exponential(-gate)) * load(ups + i));
        }
        for (int64_t i = whole; i < width; i++) {
            float gate = load_one(gates[i]);
            to[i] = store_one(gate / (1.0f + exponential(all(-gate))[0]) * load_one(ups[i]));
        }
    }
}
