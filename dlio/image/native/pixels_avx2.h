/* Inverse DCT and colour conversion with AVX2: libjpeg-turbo's arithmetic, two blocks at a time. */
#ifndef DLIO_PIXELS_H
#define DLIO_PIXELS_H

#include <immintrin.h>
#include <string.h>

#include "jpeg.h"

typedef __m256i V;

/* One dimension of the fast inverse DCT (Arai, Agui, Nakajima 1988) in 16-bit arithmetic. */
INLINE void one_dimension(V *v) {
    const V f1414 = _mm256_set1_epi16(362 << 6), f1847 = _mm256_set1_epi16(473 << 6);
    const V f1613 = _mm256_set1_epi16(-((669 - 256) << 6)), f1082 = _mm256_set1_epi16(277 << 6);
#define ADD _mm256_add_epi16
#define SUB _mm256_sub_epi16
#define TIMES(x, f) _mm256_mulhi_epi16(_mm256_slli_epi16(x, 2), f)
    V t10 = ADD(v[0], v[4]), t11 = SUB(v[0], v[4]);
    V t13 = ADD(v[2], v[6]), t12 = SUB(TIMES(SUB(v[2], v[6]), f1414), t13);
    V t0 = ADD(t10, t13), t3 = SUB(t10, t13), t1 = ADD(t11, t12), t2 = SUB(t11, t12);
    V z13 = ADD(v[5], v[3]), z10 = SUB(v[5], v[3]), z11 = ADD(v[1], v[7]), z12 = SUB(v[1], v[7]);
    V t7 = ADD(z11, z13), u11 = TIMES(SUB(z11, z13), f1414);
    V s10 = _mm256_slli_epi16(z10, 2), s12 = _mm256_slli_epi16(z12, 2);
    V z5 = _mm256_mulhi_epi16(ADD(s10, s12), f1847);
    V u12 = ADD(SUB(_mm256_mulhi_epi16(s10, f1613), z10), z5);
    V u10 = SUB(_mm256_mulhi_epi16(s12, f1082), z5);
    V t6 = SUB(u12, t7), t5 = SUB(u11, t6), t4 = ADD(u10, t5);
    v[0] = ADD(t0, t7), v[7] = SUB(t0, t7);
    v[1] = ADD(t1, t6), v[6] = SUB(t1, t6);
    v[2] = ADD(t2, t5), v[5] = SUB(t2, t5);
    v[4] = ADD(t3, t4), v[3] = SUB(t3, t4);
#undef TIMES
}

INLINE void transpose(V *v) {
    V a[8], b[8];
    for (int k = 0; k < 4; k++) {
        a[2 * k] = _mm256_unpacklo_epi16(v[2 * k], v[2 * k + 1]);
        a[2 * k + 1] = _mm256_unpackhi_epi16(v[2 * k], v[2 * k + 1]);
    }
    for (int k = 0; k < 2; k++) {
        for (int j = 0; j < 2; j++) {
            b[4 * k + 2 * j] = _mm256_unpacklo_epi32(a[4 * k + j], a[4 * k + 2 + j]);
            b[4 * k + 2 * j + 1] = _mm256_unpackhi_epi32(a[4 * k + j], a[4 * k + 2 + j]);
        }
    }
    for (int k = 0; k < 4; k++) {
        v[2 * k] = _mm256_unpacklo_epi64(b[k], b[4 + k]);
        v[2 * k + 1] = _mm256_unpackhi_epi64(b[k], b[4 + k]);
    }
}

INLINE void store_rows(V rows, uint8_t *one, uint8_t *other, size_t pitch, int pair) {
    __m128i low = _mm256_castsi256_si128(rows);
    _mm_storel_epi64((__m128i *)one, low);
    _mm_storel_epi64((__m128i *)(one + pitch), _mm_unpackhi_epi64(low, low));
    if (pair) {
        __m128i high = _mm256_extracti128_si256(rows, 1);
        _mm_storel_epi64((__m128i *)other, high);
        _mm_storel_epi64((__m128i *)(other + pitch), _mm_unpackhi_epi64(high, high));
    }
}

INLINE void clear(int16_t *blocks) {
    for (int k = 0; k < 8; k++)
        _mm256_store_si256((__m256i *)(blocks + 16 * k), _mm256_setzero_si256());
}

/* Dequantise and transform two blocks, whose rows alternate; `pair` is 0 if there is only one. */
INLINE void inverse(const int16_t *blocks, const int16_t *quant, uint8_t *one, uint8_t *other,
                    size_t pitch, int pair) {
    V v[8];
    for (int k = 0; k < 8; k++) {
        V q = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(quant + 8 * k)));
        v[k] = _mm256_mullo_epi16(_mm256_load_si256((const __m256i *)(blocks + 16 * k)), q);
    }
    one_dimension(v);
    transpose(v);
    one_dimension(v);
    for (int k = 0; k < 8; k++) v[k] = _mm256_srai_epi16(v[k], 5);
    /* Bytes, and back from columns to rows. */
    V middle = _mm256_set1_epi8((char)0x80);
    V p02 = _mm256_packs_epi16(v[0], v[2]), p13 = _mm256_packs_epi16(v[1], v[3]);
    V p46 = _mm256_packs_epi16(v[4], v[6]), p57 = _mm256_packs_epi16(v[5], v[7]);
    V q01 = _mm256_unpacklo_epi8(p02, p13), q23 = _mm256_unpackhi_epi8(p02, p13);
    V q45 = _mm256_unpacklo_epi8(p46, p57), q67 = _mm256_unpackhi_epi8(p46, p57);
    V left0 = _mm256_unpacklo_epi16(q01, q23), left4 = _mm256_unpackhi_epi16(q01, q23);
    V right0 = _mm256_unpacklo_epi16(q45, q67), right4 = _mm256_unpackhi_epi16(q45, q67);
    V r01 = _mm256_unpacklo_epi32(left0, right0), r23 = _mm256_unpackhi_epi32(left0, right0);
    V r45 = _mm256_unpacklo_epi32(left4, right4), r67 = _mm256_unpackhi_epi32(left4, right4);
    store_rows(_mm256_add_epi8(r01, middle), one, other, pitch, pair);
    store_rows(_mm256_add_epi8(r23, middle), one + 2 * pitch, other + 2 * pitch, pitch, pair);
    store_rows(_mm256_add_epi8(r45, middle), one + 4 * pitch, other + 4 * pitch, pitch, pair);
    store_rows(_mm256_add_epi8(r67, middle), one + 6 * pitch, other + 6 * pitch, pitch, pair);
}

/* Interleave 2 x 16 pixels: each half of the vectors is 16 pixels, that is 48 bytes. */
INLINE void store_rgb(V r, V g, V b, uint8_t *out) {
#define Z (-1)
    const __m128i r0 = _mm_setr_epi8(0, Z, Z, 1, Z, Z, 2, Z, Z, 3, Z, Z, 4, Z, Z, 5);
    const __m128i r1 = _mm_setr_epi8(Z, Z, 6, Z, Z, 7, Z, Z, 8, Z, Z, 9, Z, Z, 10, Z);
    const __m128i r2 = _mm_setr_epi8(Z, 11, Z, Z, 12, Z, Z, 13, Z, Z, 14, Z, Z, 15, Z, Z);
    const __m128i g0 = _mm_setr_epi8(Z, 0, Z, Z, 1, Z, Z, 2, Z, Z, 3, Z, Z, 4, Z, Z);
    const __m128i g1 = _mm_setr_epi8(5, Z, Z, 6, Z, Z, 7, Z, Z, 8, Z, Z, 9, Z, Z, 10);
    const __m128i g2 = _mm_setr_epi8(Z, Z, 11, Z, Z, 12, Z, Z, 13, Z, Z, 14, Z, Z, 15, Z);
    const __m128i b0 = _mm_setr_epi8(Z, Z, 0, Z, Z, 1, Z, Z, 2, Z, Z, 3, Z, Z, 4, Z);
    const __m128i b1 = _mm_setr_epi8(Z, 5, Z, Z, 6, Z, Z, 7, Z, Z, 8, Z, Z, 9, Z, Z);
    const __m128i b2 = _mm_setr_epi8(10, Z, Z, 11, Z, Z, 12, Z, Z, 13, Z, Z, 14, Z, Z, 15);
#undef Z
#define BOTH _mm256_broadcastsi128_si256
#define MIX(n)                                                                                  \
    _mm256_or_si256(_mm256_or_si256(_mm256_shuffle_epi8(r, BOTH(r##n)),                         \
                                    _mm256_shuffle_epi8(g, BOTH(g##n))),                        \
                    _mm256_shuffle_epi8(b, BOTH(b##n)))
    V o0 = MIX(0), o1 = MIX(1), o2 = MIX(2);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(o0, o1, 0x20));
    _mm256_storeu_si256((__m256i *)(out + 32), _mm256_permute2x128_si256(o2, o0, 0x30));
    _mm256_storeu_si256((__m256i *)(out + 64), _mm256_permute2x128_si256(o1, o2, 0x31));
#undef MIX
#undef BOTH
}

/* Differences to luma of 16 pixels. Source of the arithmetic: libjpeg-turbo's colour conversion. */
INLINE void chroma(const uint8_t *cb, const uint8_t *cr, V *red, V *green, V *blue) {
    const V centre = _mm256_set1_epi16(128), one = _mm256_set1_epi16(1);
    V u = SUB(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)cb)), centre);
    V v = SUB(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)cr)), centre);
    V b = _mm256_mulhi_epi16(ADD(u, u), _mm256_set1_epi16(-14942)); /* 0.22800 */
    V r = _mm256_mulhi_epi16(ADD(v, v), _mm256_set1_epi16(26345));  /* 0.40200 */
    b = _mm256_srai_epi16(ADD(b, one), 1), r = _mm256_srai_epi16(ADD(r, one), 1);
    *blue = ADD(ADD(b, u), u), *red = ADD(r, v);
    /* -0.34414 and 0.28586 */
    const V factors = _mm256_set1_epi32((int)((uint32_t)18734 << 16 | (uint16_t)-22554));
    const V half = _mm256_set1_epi32(1 << 15);
    V low = _mm256_madd_epi16(_mm256_unpacklo_epi16(u, v), factors);
    V high = _mm256_madd_epi16(_mm256_unpackhi_epi16(u, v), factors);
    low = _mm256_srai_epi32(_mm256_add_epi32(low, half), 16);
    high = _mm256_srai_epi32(_mm256_add_epi32(high, half), 16);
    *green = SUB(_mm256_packs_epi32(low, high), v);
}

/* Write whole groups of 32 pixels: up to 31 more than `count`, from what lies in the planes. */
INLINE void ycc_to_rgb(const uint8_t *luma, const uint8_t *cb, const uint8_t *cr, uint8_t *out,
                       int count, int across) {
    const V low = _mm256_set1_epi16(0xff);
    for (int x = 0; x < count; x += 32, luma += 32, out += 96) {
        V r, g, b, y = _mm256_loadu_si256((const __m256i *)luma);
        if (across) {
            /* Even and odd pixels of each pair have the same chroma. */
            V even = _mm256_and_si256(y, low), odd = _mm256_srli_epi16(y, 8);
            chroma(cb, cr, &r, &g, &b);
            cb += 16, cr += 16;
#define PAIRS(c)                                                                                \
    _mm256_unpacklo_epi8(_mm256_packus_epi16(ADD(c, even), ADD(c, even)),                       \
                         _mm256_packus_epi16(ADD(c, odd), ADD(c, odd)))
            store_rgb(PAIRS(r), PAIRS(g), PAIRS(b), out);
        } else {
            V r2, g2, b2;
            chroma(cb, cr, &r, &g, &b);
            chroma(cb + 16, cr + 16, &r2, &g2, &b2);
            cb += 32, cr += 32;
            V y0 = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(y));
            V y1 = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(y, 1));
#define JOIN(c)                                                                                 \
    _mm256_permute4x64_epi64(_mm256_packus_epi16(ADD(c, y0), ADD(c##2, y1)), 0xd8)
            store_rgb(JOIN(r), JOIN(g), JOIN(b), out);
        }
    }
}

INLINE void grey_to_rgb(const uint8_t *luma, uint8_t *out, int count) {
    for (int x = 0; x < count; x += 32, out += 96) {
        V y = _mm256_loadu_si256((const __m256i *)(luma + x));
        store_rgb(y, y, y, out);
    }
}

#endif
