/* Bilinear resizing of RGB, with OpenCV's fixed-point arithmetic and so with its pixels.
 *
 * Source of the arithmetic: OpenCV's resize with INTER_LINEAR for 8 bits: weights in 1/2048, sums of
 * a row shortened by 4 bits. Built with AVX2 alone: in plain C it would be slower than OpenCV.
 */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "jpeg.h"

/* Where a pixel of the result lies between two of the image. */
typedef struct {
    int32_t from;
    int16_t weight[2];
} Between;

static Between between(int place, int from, int to, int is_column) {
    double scale = 1.0 / ((double)to / from);
    float at = (float)((place + 0.5) * scale - 0.5);
    int32_t first = (int32_t)floorf(at);
    at -= (float)first;
    if (is_column && first < 0) at = 0, first = 0;
    if (is_column && first >= from - 1) at = 0, first = from - 1;
    float rest = 1.0f - at;
    return (Between){first, {(int16_t)lrintf(rest * 2048), (int16_t)lrintf(at * 2048)}};
}

/* One row of the image, resized: 4 sums a pixel, of which the last is not used. */
INLINE void one_row(const uint8_t *row, const Resize *size, const Between *columns,
                    const int16_t *weights, int16_t *sums) {
    const __m256i pairs = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
#define TWO(k)                                                                                  \
    _mm256_srai_epi32(                                                                          \
        _mm256_madd_epi16(                                                                      \
            _mm256_shuffle_epi8(                                                                \
                _mm256_inserti128_si256(                                                        \
                    _mm256_castsi128_si256(                                                     \
                        _mm_loadu_si128((const __m128i *)(row + columns[x + (k)].from * 3))),   \
                    _mm_loadu_si128((const __m128i *)(row + columns[x + (k) + 2].from * 3)), 1), \
                pairs),                                                                         \
            _mm256_loadu_si256((const __m256i *)(weights + 8 * x + 16 * (k)))),                 \
        4)
    for (int x = size->begin; x < size->end; x += 4)
        _mm256_storeu_si256((__m256i *)(sums + 4 * x), _mm256_packs_epi32(TWO(0), TWO(1)));
#undef TWO
    for (int x = 0; x < size->columns; x++) {
        if (x == size->begin) x = size->end;
        if (x >= size->columns) break;
        const uint8_t *pixel = row + 3 * (size_t)columns[x].from;
        const uint8_t *next = columns[x].from + 1 < size->width ? pixel + 3 : pixel;
        for (int c = 0; c < 3; c++)
            sums[4 * x + c] = (int16_t)((pixel[c] * columns[x].weight[0] +
                                         next[c] * columns[x].weight[1]) >> 4);
    }
}

/* Lay out the weights of four pixels at a time as `one_row` reads them: of pixels 0, 2, 1 and 3.
 * It reads 16 bytes at a pixel: those of columns from `begin` to `end` lie within the row. */
static void lay_out(Resize *size, const Between *columns, int16_t *weights) {
    int x = 0, most = size->width - 6;
    while (x < size->columns && columns[x].from > most) x++;
    size->begin = x;
    for (; x + 4 <= size->columns; x += 4) {
        int k = 0;
        while (k < 4 && columns[x + k].from <= most) k++;
        if (k < 4) break;
        for (k = 0; k < 4; k++) {
            int16_t *to = weights + 8 * x + 8 * (k == 1 ? 2 : k == 2 ? 1 : k);
            for (int j = 0; j < 8; j++) to[j] = columns[x + k].weight[j & 1];
        }
    }
    size->end = x;
}

INLINE void mix_rows(const int16_t *one, const int16_t *other, const int16_t *weight, uint8_t *out,
                     int columns) {
    int x = 0;
    const __m256i w0 = _mm256_set1_epi16(weight[0]), w1 = _mm256_set1_epi16(weight[1]);
    const __m256i two = _mm256_set1_epi16(2), rgb = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    /* The last four bytes that are written are overwritten by the next pixels. */
    for (; x + 8 < columns - 1; x += 8) {
        __m256i half[2];
        for (int k = 0; k < 2; k++) {
            const __m256i *a = (const __m256i *)(one + 4 * x) + k;
            const __m256i *b = (const __m256i *)(other + 4 * x) + k;
            __m256i sum = _mm256_add_epi16(_mm256_mulhi_epi16(_mm256_loadu_si256(a), w0),
                                           _mm256_mulhi_epi16(_mm256_loadu_si256(b), w1));
            half[k] = _mm256_srai_epi16(_mm256_add_epi16(sum, two), 2);
        }
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(half[0], half[1]), 0xd8);
        bytes = _mm256_shuffle_epi8(bytes, rgb);
        _mm_storeu_si128((__m128i *)(out + 3 * x), _mm256_castsi256_si128(bytes));
        _mm_storeu_si128((__m128i *)(out + 3 * x + 12), _mm256_extracti128_si256(bytes, 1));
    }
    for (; x < columns; x++) {
        for (int c = 0; c < 3; c++) {
            int value = (one[4 * x + c] * weight[0] >> 16) + (other[4 * x + c] * weight[1] >> 16);
            value = (value + 2) >> 2;
            out[3 * x + c] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
        }
    }
}

void dlio_resize_rgb(const uint8_t *pixels, size_t pitch, Resize *size, uint8_t *memory,
                     uint8_t *out) {
    Between *columns = (Between *)(void *)memory;
    int16_t *weights = (int16_t *)(void *)(columns + size->columns), *sums[2];
    sums[0] = weights + 8 * (size_t)size->columns;
    sums[1] = sums[0] + 4 * (size_t)size->columns;
    int32_t held[2] = {-1, -1}; /* rows of the image whose sums these are */
    for (int x = 0; x < size->columns; x++)
        columns[x] = between(size->flip ? size->columns - 1 - x : x, size->width, size->columns, 1);
    lay_out(size, columns, weights);
    for (int y = 0; y < size->rows; y++) {
        Between rows = between(y, size->height, size->rows, 0);
        const int16_t *use[2];
        for (int k = 0; k < 2; k++) {
            int32_t row = rows.from + k < 0 ? 0 : rows.from + k;
            if (row > size->height - 1) row = size->height - 1;
            int at = held[0] == row ? 0 : held[1] == row ? 1 : -1;
            if (at < 0) {
                /* Of the two that are held, the other one may be needed next to this one. */
                at = k ? use[0] == sums[0] : held[0] > held[1];
                one_row(pixels + (size_t)row * pitch, size, columns, weights, sums[at]);
                held[at] = row;
            }
            use[k] = sums[at];
        }
        int to = size->upend ? size->rows - 1 - y : y;
        mix_rows(use[0], use[1], rows.weight, out + (size_t)to * (size_t)size->columns * 3,
                 size->columns);
    }
}
