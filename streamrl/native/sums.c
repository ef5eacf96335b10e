/* Sums of the rows and of the columns of a matrix of unsigned integers, both in one pass over it, modulo two to the power
 * of the integers' width. */

#include <stdint.h>

#define AT_ONCE 4 /* rows */

/* Writes the sum of each row, and adds to those of the columns. */
#define SUMS(name, integer)                                                                                            \
    void name(const integer *matrix, int64_t rows, int64_t columns, integer *restrict of_rows,                         \
              integer *restrict of_columns)                                                                            \
    {                                                                                                                  \
        int64_t row = 0;                                                                                               \
        for (; row + AT_ONCE <= rows; row += AT_ONCE) {                                                                \
            const integer *a = matrix + row * columns, *b = a + columns, *c = b + columns, *d = c + columns;           \
            integer of_a = 0, of_b = 0, of_c = 0, of_d = 0;                                                            \
            for (int64_t i = 0; i < columns; i++) {                                                                    \
                of_a += a[i];                                                                                          \
                of_b += b[i];                                                                                          \
                of_c += c[i];                                                                                          \
                of_d += d[i];                                                                                          \
                of_columns[i] += a[i] + b[i] + c[i] + d[i];                                                            \
            }                                                                                                          \
            of_rows[row] = of_a;                                                                                       \
            of_rows[row + 1] = of_b;                                                                                   \
            of_rows[row + 2] = of_c;                                                                                   \
            of_rows[row + 3] = of_d;                                                                                   \
        }                                                                                                              \
        for (; row < rows; row++) {                                                                                    \
            const integer *a = matrix + row * columns;                                                                 \
            integer of_a = 0;                                                                                          \
            for (int64_t i = 0; i < columns; i++) {                                                                    \
                of_a += a[i];                                                                                          \
                of_columns[i] += a[i];                                                                                 \
            }                                                                                                          \
            of_rows[row] = of_a;                                                                                       \
        }                                                                                                              \
    }

SUMS(sums_of_1, uint8_t)
SUMS(sums_of_2, uint16_t)
SUMS(sums_of_4, uint32_t)
SUMS(sums_of_8, uint64_t)
