/* Inverse DCT and colour conversion in plain C: bit for bit the arithmetic of pixels_avx2.h. */
#ifndef DLIO_PIXELS_H
#define DLIO_PIXELS_H

#include <string.h>

#include "jpeg.h"

INLINE int16_t wrap(int32_t x) { return (int16_t)(uint16_t)(uint32_t)x; }

/* The high half of a 16-bit product. */
INLINE int16_t times(int16_t x, int factor) { return (int16_t)((x * factor) >> 16); }

/* One dimension of the fast inverse DCT (Arai, Agui, Nakajima 1988) in 16-bit arithmetic. */
INLINE void one_dimension(int16_t *v, int step) {
#define AT(k) v[(k) * step]
#define SUM(a, b) wrap((a) + (b))
#define LESS(a, b) wrap((a) - (b))
#define FOUR(a) wrap((a) * 4)
    int16_t t10 = SUM(AT(0), AT(4)), t11 = LESS(AT(0), AT(4)), t13 = SUM(AT(2), AT(6));
    int16_t t12 = LESS(times(FOUR(LESS(AT(2), AT(6))), 362 << 6), t13);
    int16_t t0 = SUM(t10, t13), t3 = LESS(t10, t13), t1 = SUM(t11, t12), t2 = LESS(t11, t12);
    int16_t z13 = SUM(AT(5), AT(3)), z10 = LESS(AT(5), AT(3));
    int16_t z11 = SUM(AT(1), AT(7)), z12 = LESS(AT(1), AT(7));
    int16_t t7 = SUM(z11, z13), u11 = times(FOUR(LESS(z11, z13)), 362 << 6);
    int16_t s10 = FOUR(z10), s12 = FOUR(z12), z5 = times(SUM(s10, s12), 473 << 6);
    int16_t u12 = SUM(LESS(times(s10, -((669 - 256) << 6)), z10), z5);
    int16_t u10 = LESS(times(s12, 277 << 6), z5);
    int16_t t6 = LESS(u12, t7), t5 = LESS(u11, t6), t4 = SUM(u10, t5);
    AT(0) = SUM(t0, t7), AT(7) = LESS(t0, t7), AT(1) = SUM(t1, t6), AT(6) = LESS(t1, t6);
    AT(2) = SUM(t2, t5), AT(5) = LESS(t2, t5), AT(4) = SUM(t3, t4), AT(3) = LESS(t3, t4);
#undef AT
#undef SUM
#undef LESS
#undef FOUR
}

INLINE void clear(int16_t *blocks) { memset(blocks, 0, 2 * 64 * sizeof *blocks); }

/* Dequantise and transform two blocks, whose rows alternate; `pair` is 0 if there is only one. */
INLINE void inverse(const int16_t *blocks, const int16_t *quant, uint8_t *one, uint8_t *other,
                    size_t pitch, int pair) {
    int16_t v[64];
    for (int half = 0; half <= pair; half++) {
        uint8_t *out = half ? other : one;
        for (int k = 0; k < 64; k++)
            v[k] = wrap((int32_t)blocks[(k >> 3) * 16 + half * 8 + (k & 7)] * quant[k]);
        for (int k = 0; k < 8; k++) one_dimension(v + k, 8);
        for (int k = 0; k < 8; k++) one_dimension(v + 8 * k, 1);
        for (int k = 0; k < 64; k++) {
            int x = v[k] >> 5;
            out[(size_t)(k >> 3) * pitch + (k & 7)] =
                (uint8_t)((x < -128 ? -128 : x > 127 ? 127 : x) + 128);
        }
    }
}

INLINE uint8_t clip(int x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

INLINE void ycc_to_rgb(const uint8_t *luma, const uint8_t *cb, const uint8_t *cr, uint8_t *out,
                       int count, int across) {
    for (int x = 0; x < count; x++, out += 3) {
        int y = luma[x], u = cb[x >> across] - 128, v = cr[x >> across] - 128;
        out[0] = clip(y + v + (((2 * v * 26345 >> 16) + 1) >> 1));
        out[1] = clip(y - v + ((u * -22554 + v * 18734 + (1 << 15)) >> 16));
        out[2] = clip(y + 2 * u + (((2 * u * -14942 >> 16) + 1) >> 1));
    }
}

INLINE void grey_to_rgb(const uint8_t *luma, uint8_t *out, int count) {
    for (int x = 0; x < count; x++, out += 3) out[0] = out[1] = out[2] = luma[x];
}

#endif
