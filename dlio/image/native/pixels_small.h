/* Inverse DCTs of 8 x 8 coefficients to 4 x 4, 2 x 2 and 1 pixel: libjpeg-turbo's, for images that
 * are decoded at a fraction of their size. Source: its jidctred.c, in the 16-bit arithmetic of its
 * SSE2 code. Compilers make vectors of the loops. */
#ifndef DLIO_PIXELS_SMALL_H
#define DLIO_PIXELS_SMALL_H

#include <stdint.h>
#include <string.h>

#include "jpeg.h"

/* Factors of 2^13. */
enum {
    F0211 = 1730, F0509 = 4176, F0601 = 4926, F0720 = 5906, F0765 = 6270, F0850 = 6967,
    F0899 = 7373, F1061 = 8697, F1272 = 10426, F1451 = 11893, F1847 = 15137, F2172 = 17799,
    F2562 = 20995, F3624 = 29692
};

INLINE int32_t descale(uint32_t value, int bits) {
    return (int32_t)(value + (1u << (bits - 1))) >> bits;
}

INLINE int16_t saturated(int32_t value) {
    return (int16_t)(value < -32768 ? -32768 : value > 32767 ? 32767 : value);
}

INLINE uint8_t pixel_of(int32_t value) {
    return (uint8_t)((value < -128 ? -128 : value > 127 ? 127 : value) + 128);
}

/* One dimension of the transform to four; `step` elements are from a coefficient to the next. */
INLINE void to_four(const int16_t *in, int step, int bits, int32_t out[4]) {
#define AT(k) ((uint32_t)(int32_t)in[(k) * step])
    uint32_t even = AT(0) << 14, more = AT(2) * F1847 - AT(6) * F0765;
    uint32_t t0 = AT(5) * F1451 - AT(7) * F0211 - AT(3) * F2172 + AT(1) * F1061;
    uint32_t t2 = AT(3) * F0899 + AT(1) * F2562 - AT(7) * F0509 - AT(5) * F0601;
    uint32_t t10 = even + more, t12 = even - more;
    out[0] = descale(t10 + t2, bits), out[3] = descale(t10 - t2, bits);
    out[1] = descale(t12 + t0, bits), out[2] = descale(t12 - t0, bits);
}

INLINE void to_two(const int16_t *in, int step, int bits, int32_t out[2]) {
    uint32_t even = AT(0) << 15;
    uint32_t odd = AT(5) * F0850 + AT(1) * F3624 - AT(7) * F0720 - AT(3) * F1272;
    out[0] = descale(even + odd, bits), out[1] = descale(even - odd, bits);
#undef AT
}

/* Coefficients are as in a block of scan.c: rows of 8, 16 apart. `quant` is natural. */
INLINE void inverse_small(const int16_t *block, const int16_t *quant, int size, uint8_t *out,
                          size_t pitch) {
    if (size == 1) {
        /* Values beyond its table wrap there. */
        int32_t value = (block[0] * quant[0] + 4) >> 3;
        *out = pixel_of(((value + 512) & 1023) - 512);
        return;
    }
    int16_t in[64], half[4 * 8];
    for (int row = 0; row < 8; row++)
        for (int k = 0; k < 8; k++)
            in[row * 8 + k] = (int16_t)(block[row * 16 + k] * quant[row * 8 + k]);
    if (size == 4) {
        for (int k = 0; k < 8; k++) {
            int32_t made[4];
            to_four(in + k, 8, 12, made);
            for (int row = 0; row < 4; row++) half[row * 8 + k] = saturated(made[row]);
        }
        for (int row = 0; row < 4; row++) {
            int32_t made[4];
            to_four(half + row * 8, 1, 19, made);
            for (int k = 0; k < 4; k++) out[(size_t)row * pitch + (size_t)k] = pixel_of(made[k]);
        }
    } else {
        for (int k = 0; k < 8; k++) {
            int32_t made[2];
            to_two(in + k, 8, 13, made);
            half[k] = saturated(made[0]), half[8 + k] = saturated(made[1]);
        }
        for (int row = 0; row < 2; row++) {
            int32_t made[2];
            to_two(half + row * 8, 1, 20, made);
            out[(size_t)row * pitch] = pixel_of(made[0]);
            out[(size_t)row * pitch + 1] = pixel_of(made[1]);
        }
    }
}

#endif
