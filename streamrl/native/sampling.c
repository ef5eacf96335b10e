/* Draws tokens; `operations.py` says how. */

#include "numbers.h"

#define PART 512 /* logits whose weights are summed before they are added to the others, or more; a multiple of WIDTH */
#define MOST_PARTS 1024

/* `count` logits, and beyond them some that have no weight. */
INLINE vector scaled(const number *logits, int64_t count, float scale)
{
    if (count >= WIDTH) return load(logits) * scale;
    number padded[WIDTH];
    for (int i = 0; i < WIDTH; i++) padded[i] = i < count ? logits[i] : store_one(-__builtin_inff());
    return load(padded) * scale;
}

/* From each row of logits [rows, width], which softmax makes shares of after they are multiplied by scales[row]: the
 * first token up to which the shares add up to more than uniforms[row], into tokens, and its share, into shares. Where
 * rounding finds none, the last that has a share. Something else than numbers makes the share a NaN. */
void draw(const number *logits, int64_t rows, int64_t width, const float *scales, const double *uniforms,
          int64_t *tokens, double *shares, int threads)
{
    int64_t part = PART;
    while (part * MOST_PARTS < width) part *= 2;
    int64_t parts = (width + part - 1) / part;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = logits + row * width;
        const float scale = scales[row];
        vector highest = scaled(from, width, scale);
        for (int64_t i = WIDTH; i < width; i += WIDTH) {
            vector some = scaled(from + i, width - i, scale);
            highest = choose(some > highest, some, highest);
        }
        const float largest = largest_of(highest);
        float weights[MOST_PARTS];
        double total = 0;
        int64_t last = 0;
        for (int64_t p = 0; p < parts; p++) {
            int64_t end = width < (p + 1) * part ? width : (p + 1) * part;
            vector sum = all(0);
            for (int64_t i = p * part; i < end; i += WIDTH) sum += exponential(scaled(from + i, width - i, scale) - largest);
            weights[p] = sum_of(sum);
            total += weights[p];
            if (weights[p] > 0) last = p;
        }
        double before = 0, wanted = uniforms[row] * total;
        int64_t chosen = 0;
        while (chosen < last && before + weights[chosen] <= wanted) before += weights[chosen++];
        float share = 0;
        tokens[row] = chosen * part;
        for (int64_t i = chosen * part; i < width && i < (chosen + 1) * part && before <= wanted; i += WIDTH) {
            vector each = exponential(scaled(from + i, width - i, scale) - largest);
            for (int j = 0; j < WIDTH && before <= wanted; j++) {
                if (!(each[j] > 0)) continue;
                tokens[row] = i + j;
                share = each[j];
                before += share;
            }
        }
        shares[row] = share / total;
    }
}
