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
