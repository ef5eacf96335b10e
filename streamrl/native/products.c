/* Products of activations with weights that are packed in the order in which they are read. `operations.py`
 * calls them.
 *
 * Packed weights are panels of 3 * WIDTH outputs: a word of each output, then the next word of each, where a word is
 * one input in float32 and two in bfloat16. A block of 8 rows of the activations times a panel fits the registers of a
 * processor with AVX512. Each output is summed in the order of its inputs, so it does not depend on how many rows are
 * computed with it. */

#include "numbers.h"

#if defined(BFLOAT16) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define VECTORS 3 /* of a panel's outputs */
#define PANEL (VECTORS * WIDTH)
#define ROWS 8                            /* that are computed together */
#define IN_WORD (4 / (int)sizeof(number)) /* inputs in a word */
#define LINE 64                           /* bytes that memory is read by */
#define FEW 131072                        /* multiplications that one thread is done with before another has begun */

/* The word of `count` inputs. */
INLINE uint32_t word_of(const number *inputs, int count)
{
    uint32_t word = 0;
    memcpy(&word, inputs, count * sizeof(number));
    return word;
}

INLINE vector sum_with(vector sum, uint32_t input, words weights)
{
#ifndef BFLOAT16
    float value;
    memcpy(&value, &input, sizeof value);
    return sum + value * (vector)weights;
#elif defined(__AVX512BF16__)
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)input), (__m512bh)weights);
#else
    float first = load_one((number)input), second = load_one((number)(input >> 16));
    return sum + first * (vector)(weights << 16) + second * (vector)(weights & 0xffff0000u);
#endif
}

/* --- Packing ------------------------------------------------------------------------------------------------------ */

/* Rows become columns: exchange the blocks of 8 that are off the diagonal, then those of 4 in each, and so on. */
INLINE void transpose(words square[WIDTH])
{
    words a, b;
#define EXCHANGE(size, upper, lower) \
    for (int i = 0; i < WIDTH; i++) \
        if (!(i & size)) { \
            a = square[i], b = square[i + size]; \
            square[i] = SHUFFLE(a, b, upper), square[i + size] = SHUFFLE(a, b, lower); \
        }
#define LIST(...) __VA_ARGS__
#pragma GCC unroll 16
    EXCHANGE(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#undef LIST
#undef EXCHANGE
}

INLINE int64_t words_of(int64_t inputs) { return (inputs + IN_WORD - 1) / IN_WORD; }
INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* How many numbers `pack` writes for a matrix. */
int64_t packed_numbers(int64_t outputs, int64_t inputs)
{
    return panels_of(outputs) * PANEL * words_of(inputs) * IN_WORD;
}

/* weight [outputs, inputs], contiguous, into packed, which begins at a multiple of 64 bytes. */
void pack(const number *weight, words *packed, int64_t outputs, int64_t inputs, int threads)
{
    int64_t length = words_of(inputs);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < panels_of(outputs) * VECTORS; part++) {
        words *to = packed + part / VECTORS * length * VECTORS + part % VECTORS;
        for (int64_t first = 0; first < length; first += WIDTH) {
            int64_t left = inputs - first * IN_WORD;
            words square[WIDTH];
            for (int i = 0; i < WIDTH; i++) {
                int64_t output = part * WIDTH + i;
                int64_t count = output >= outputs ? 0 : left < WIDTH * IN_WORD ? left : WIDTH * IN_WORD;
                square[i] = (words){0};
                if (count) memcpy(&square[i], weight + output * inputs + first * IN_WORD, count * sizeof(number));
            }
            transpose(square);
            int64_t filled = length - first < WIDTH ? length - first : WIDTH;
            for (int64_t i = 0; i < filled; i++) to[(first + i) * VECTORS] = square[i];
        }
    }
}

/* --- Products ----------------------------------------------------------------------------------------------------- */

/* Adds `rows` words, `stride` inputs apart, times those of a panel. All counts are constants wherever this is called. */
INLINE void add(vector sums[ROWS][VECTORS], const number *x, int64_t stride, int rows, int in_word, const words *panel)
{
    words weights[VECTORS];
#pragma GCC unroll 3
    for (int v = 0; v < VECTORS; v++) weights[v] = panel[v];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        uint32_t input = word_of(x + r * stride, in_word);
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = sum_with(sums[r][v], input, weights[v]);
    }
}

/* `rows` of x times a panel, plus what the sums are. Meanwhile the memory at `ahead` is fetched, `lines` for each word. */
INLINE void multiply(vector sums[ROWS][VECTORS], const number *x, int64_t inputs, int rows, const words *panel,
                     const char *ahead, int lines)
{
    int64_t whole = inputs / IN_WORD;
    for (int64_t i = 0; i < whole; i++) {
#pragma GCC unroll 3
        for (int l = 0; l < lines; l++) __builtin_prefetch(ahead + (i * lines + l) * LINE, 0, 2);
        add(sums, x + i * IN_WORD, inputs, rows, IN_WORD, panel + i * VECTORS);
    }
    if (inputs % IN_WORD) add(sums, x + whole * IN_WORD, inputs, rows, 1, panel + whole * VECTORS);
}

/* Sums begin with the `count` first numbers of bias, and of rows of what is to be added; both may be NULL. */
INLINE void begin(vector sums[ROWS][VECTORS], int rows, const number *bias, const number *added, int64_t outputs,
                  int64_t count)
{
    number padded[PANEL] = {0};
    if (bias) memcpy(padded, bias, (count < PANEL ? count : PANEL) * sizeof(number));
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(padded + v * WIDTH);
    if (!added) return;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const number *row = added + r * outputs;
        if (count < PANEL) row = memcpy(padded, row, count * sizeof(number));
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) sums[r][v] += load(row + v * WIDTH);
    }
}

/* The first `count` sums of each row into rows of out. */
INLINE void put(vector sums[ROWS][VECTORS], int rows, number *out, int64_t outputs, int64_t count)
{
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        number padded[PANEL], *to = count < PANEL ? padded : out + r * outputs;
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) store(to + v * WIDTH, sums[r][v]);
        if (count < PANEL) memcpy(out + r * outputs, padded, count * sizeof(number));
    }
}

/* One task of `product`, or of `gated_product` if there is a panel of gates. */
INLINE void compute(const number *x, int64_t inputs, int rows, const words *gates, const words *panel,
                    const number *bias, const number *added, number *out, int64_t outputs, int64_t count,
                    int64_t ahead, int lines)
{
    vector sums[ROWS][VECTORS], gate[ROWS][VECTORS];
    if (gates) {
        begin(gate, rows, (void *)0, (void *)0, outputs, count);
        multiply(gate, x, inputs, rows, gates, (const char *)(gates + ahead), lines);
    }
    begin(sums, rows, bias, added, outputs, count);
    multiply(sums, x, inputs, rows, panel, (const char *)(panel + ahead), lines);
    if (gates)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) sums[r][v] *= gate[r][v] / (1.0f + exponential(-gate[r][v]));
    put(sums, rows, out, outputs, count);
}

INLINE void compute_all(const number *x, int64_t rows, int64_t inputs, const words *gates, const words *packed,
                        int64_t outputs, const number *bias, const number *added, number *out, int threads)
{
    int64_t length = words_of(inputs) * VECTORS, panels = panels_of(outputs), blocks = (rows + ROWS - 1) / ROWS;
    int lines = blocks < VECTORS ? VECTORS : 1; /* so many that the next panel is fetched during one, or VECTORS, blocks */
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * inputs * outputs > FEW)
    for (int64_t task = 0; task < panels * blocks; task++) {
        int64_t p = task / blocks, block = task % blocks, first = block * ROWS, fetched = block * length / VECTORS * lines;
        int64_t ahead = p + 1 < panels && fetched < length ? length + fetched : 0;
        const words *panel = packed + p * length, *gate = gates ? gates + p * length : gates;
        int64_t place = first * outputs + p * PANEL, count = outputs - p * PANEL;
        const number *from = x + first * inputs, *b = bias ? bias + p * PANEL : bias, *a = added ? added + place : added;
        number *to = out + place;
#define CASE(n) \
    case n: compute(from, inputs, n, gate, panel, b, a, to, outputs, count, ahead, VECTORS); break;
        switch (rows - first < ROWS ? rows - first : ROWS) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        case ROWS:
            if (lines == 1) compute(from, inputs, ROWS, gate, panel, b, a, to, outputs, count, ahead, 1);
            else compute(from, inputs, ROWS, gate, panel, b, a, to, outputs, count, ahead, VECTORS);
        }
#undef CASE
    }
}

/* x [rows, inputs] times what `pack` has made of [outputs, inputs], plus bias [outputs] and added [rows, outputs], which
 * may be NULL, into out [rows, outputs]; all contiguous. */
void product(const number *x, int64_t rows, int64_t inputs, const words *packed, int64_t outputs, const number *bias,
             const number *added, number *out, int threads)
{
    compute_all(x, rows, inputs, (void *)0, packed, outputs, bias, added, out, threads);
}

/* silu of the product of x with `gates`, times that with `packed`, which both are of [outputs, inputs]. */
void gated_product(const number *x, int64_t rows, int64_t inputs, const words *gates, const words *packed,
                   int64_t outputs, number *out, int threads)
{
    compute_all(x, rows, inputs, gates, packed, outputs, (void *)0, (void *)0, out, threads);
}
