/* Numbers, and vectors of them, for code that is compiled for one number format: float32, or bfloat16 with -DBFLOAT16.
 * All is computed in float32. */

#pragma once

#include <stdint.h>
#include <string.h>

#define WIDTH 16 /* numbers that are worked on together */

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

/* Vectors of the numbers at these places, 0 to WIDTH - 1 of the first and then of the second. */
#ifdef __clang__
#define SHUFFLE(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define SHUFFLE(first, second, ...) __builtin_shuffle(first, second, (integers){__VA_ARGS__})
#endif

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

INLINE vector choose(integers condition, vector yes, vector no)
{
    return (vector)(((integers)yes & condition) | ((integers)no & ~condition));
}

INLINE float largest_of(vector v)
{
#define PLACE(i) ((i) & (WIDTH - 1))
#define TURNED(i) PLACE(i), PLACE(i + 1), PLACE(i + 2), PLACE(i + 3)
#define LARGER(i) choose(v > SHUFFLE(v, v, TURNED(i), TURNED(i + 4), TURNED(i + 8), TURNED(i + 12)), v, \
                         SHUFFLE(v, v, TURNED(i), TURNED(i + 4), TURNED(i + 8), TURNED(i + 12)))
    v = LARGER(8);
    v = LARGER(4);
    v = LARGER(2);
    return v[0] > v[1] ? v[0] : v[1];
#undef PLACE
#undef TURNED
#undef LARGER
}

/* e to the power of x, to about 2e-7 of its value; 0 below -87, infinite above 88, NaN of NaN. 2^n * e^r, where |r| is at
 * most ln(2) / 2, and e^r is its Taylor polynomial. */
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
