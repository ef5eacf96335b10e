/* What the forward pass does besides matrix products, on a CPU: each function is one pass over memory that torch makes
 * in several. `operations.py` says what is computed, and by which call. */

#include "numbers.h"

#define FEW 8192 /* numbers that one thread is done with before another has begun */

/* --- Attention ---------------------------------------------------------------------------------------------------- */

#define REGISTERS 16 /* vectors of queries that are computed together with the keys and values that they share */
#define MOST_QUERIES 8
#define MOST_VECTORS 16
#define BLOCK 64 /* tokens, a multiple of WIDTH */
#define LEAST -3.0e38f

/* The sum of each of the vectors, which are overwritten. In four steps, each adds halves of two vectors, so that half as
 * many are left: first those of every four numbers, then fours of numbers. */
INLINE vector sums_of(vector each[WIDTH])
{
    vector a, b;
#define HALVE(count, low, high) \
    for (int i = 0; i < count; i++) { \
        a = each[2 * i], b = each[2 * i + 1]; \
        each[i] = SHUFFLE(a, b, low) + SHUFFLE(a, b, high); \
    }
#define LIST(...) __VA_ARGS__
#pragma GCC unroll 8
    HALVE(8, LIST(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
          LIST(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31))
#pragma GCC unroll 4
    HALVE(4, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 2
    HALVE(2, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    HALVE(1, LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
          LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#undef LIST
#undef HALVE
    return each[0];
}

INLINE void fetch(const number *from, int vectors)
{
    for (int i = 0; i < vectors * WIDTH * (int)sizeof(number); i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* `count` queries over `length` tokens, block by block with the softmax of what was seen so far (Milakov and
 * Gimelshein, 2018). `vectors`: of a head; both are constants wherever this is called. Meanwhile as many tokens are
 * fetched as this has, of the keys and values at `ahead`, which are as far apart as these. */
INLINE void attend(const number *queries, int count, const number *keys, const number *values, const number *ahead,
                   int64_t stride, int64_t length, int vectors, float scale, number *out)
{
    const int head_dim = vectors * WIDTH;
    vector sums[MOST_QUERIES][MOST_VECTORS], scores[MOST_QUERIES][BLOCK / WIDTH], dots[MOST_QUERIES][WIDTH];
    float total[MOST_QUERIES], largest[MOST_QUERIES];
    for (int q = 0; q < count; q++) {
        total[q] = 0;
        largest[q] = LEAST;
        for (int i = 0; i < vectors; i++) sums[q][i] = all(0);
    }
    for (int64_t first = 0; first < length; first += BLOCK) {
        int tokens = length - first < BLOCK ? (int)(length - first) : BLOCK;
        int parts = (tokens + WIDTH - 1) / WIDTH;
        vector query[MOST_QUERIES][MOST_VECTORS];
#pragma GCC unroll 8
        for (int q = 0; q < count; q++)
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) query[q][i] = load(queries + q * head_dim + i * WIDTH) * scale;
        for (int part = 0; part < parts; part++) {
            int here = tokens - part * WIDTH < WIDTH ? tokens - part * WIDTH : WIDTH;
            for (int t = 0; t < here; t++) {
                int64_t row = (first + part * WIDTH + t) * stride;
                fetch(ahead + row, vectors);
                vector key[MOST_VECTORS];
#pragma GCC unroll 16
                for (int i = 0; i < vectors; i++) key[i] = load(keys + row + i * WIDTH);
#pragma GCC unroll 8
                for (int q = 0; q < count; q++) {
                    vector dot = query[q][0] * key[0];
#pragma GCC unroll 16
                    for (int i = 1; i < vectors; i++) dot += query[q][i] * key[i];
                    dots[q][t] = dot;
                }
            }
            for (int q = 0; q < count; q++) {
                for (int t = here; t < WIDTH; t++) dots[q][t] = all(LEAST / WIDTH);
                scores[q][part] = sums_of(dots[q]);
            }
        }
        for (int q = 0; q < count; q++) {
            vector highest = all(largest[q]);
            for (int part = 0; part < parts; part++)
                highest = choose(scores[q][part] > highest, scores[q][part], highest);
            float now = largest_of(highest);
            vector correction = exponential(all(largest[q] - now));
            largest[q] = now;
            vector exponentials = all(0);
            for (int part = 0; part < parts; part++) {
                scores[q][part] = exponential(scores[q][part] - now);
                exponentials += scores[q][part];
            }
            total[q] = total[q] * correction[0] + sum_of(exponentials);
            for (int i = 0; i < vectors; i++) sums[q][i] *= correction;
        }
        vector sum[MOST_QUERIES][MOST_VECTORS];
#pragma GCC unroll 8
        for (int q = 0; q < count; q++)
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) sum[q][i] = sums[q][i];
        for (int t = 0; t < tokens; t++) {
            int64_t row = (first + t) * stride;
            fetch(ahead + (values - keys) + row, vectors);
            vector value[MOST_VECTORS];
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) value[i] = load(values + row + i * WIDTH);
#pragma GCC unroll 8
            for (int q = 0; q < count; q++) {
                float share;
                memcpy(&share, (const char *)scores[q] + t * sizeof share, sizeof share);
#pragma GCC unroll 16
                for (int i = 0; i < vectors; i++) sum[q][i] += value[i] * share;
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < count; q++)
#pragma GCC unroll 16
            for (int i = 0; i < vectors; i++) sums[q][i] = sum[q][i];
    }
    for (int q = 0; q < count; q++)
        for (int i = 0; i < vectors; i++) store(out + q * head_dim + i * WIDTH, sums[q][i] / total[q]);
}

/* Each token to those of its slot up to its own position. queries [tokens, heads, head_dim], rows `query_stride` apart;
 * cache [slots, length, 2 * kv_heads, head_dim], keys first; slots and positions [tokens]; out [tokens, heads, head_dim],
 * contiguous. There is code for the numbers of vectors and queries below. */
void attend_tokens(const number *queries, int64_t query_stride, const number *cache, int64_t slot_stride,
                   int64_t token_stride, const int64_t *slots, const int64_t *positions, number *out, int64_t tokens,
                   int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, int threads)
{
    const int vectors = (int)head_dim / WIDTH, most = REGISTERS / vectors < MOST_QUERIES ? REGISTERS / vectors : MOST_QUERIES;
    int64_t group = heads / kv_heads, tasks = tokens * kv_heads, chunk = tasks / (8 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk > 0 ? chunk : 1)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t token = task / kv_heads, head = task % kv_heads, next = task + 1 < tasks ? task + 1 : task;
        const number *keys = cache + slots[token] * slot_stride + head * head_dim, *values = keys + kv_heads * head_dim;
        const number *ahead = cache + slots[next / kv_heads] * slot_stride + next % kv_heads * head_dim;
        for (int64_t first = 0; first < group; first += most) {
            const number *query = queries + token * query_stride + (head * group + first) * head_dim;
            number *to = out + (token * heads + head * group + first) * head_dim;
            switch (vectors * 16 + (int)(group - first < most ? group - first : most)) {
#define CASE(v, n) \
    case v * 16 + n: attend(query, n, keys, values, ahead, token_stride, positions[token] + 1, v, scale, to); break;
                CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4) CASE(2, 5) CASE(2, 6) CASE(2, 7) CASE(2, 8)
                CASE(4, 1) CASE(4, 2) CASE(4, 3) CASE(4, 4)
                CASE(6, 1) CASE(6, 2)
                CASE(8, 1) CASE(8, 2)
                CASE(16, 1)
#undef CASE
            }
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
void rotate_and_store(number *qkv, int64_t heads, int64_t turned, int64_t kept, int64_t head_dim, const number *rotation,
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
