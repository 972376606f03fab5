/* Entropy decoding, inverse DCT and colour conversion of the MCUs that a crop touches.
 *
 * Built with AVX2 and BMI2. The pixels are those of libjpeg-turbo with its fast inverse DCT and
 * without smooth upsampling.
 */
#include <string.h>

#include "jpeg.h"
#include "pixels_avx2.h"
#include "pixels_small.h"

/* Copy a vector of bytes; returns the number of them before the first 0xff. */
enum { VECTOR = 32 };
INLINE int copy_plain(const uint8_t *data, uint8_t *out) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)data);
    _mm256_storeu_si256((__m256i *)out, bytes);
    uint32_t full = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-1)));
    return full ? __builtin_ctz(full) : VECTOR;
}

const uint8_t *dlio_unstuff(const uint8_t *data, const uint8_t *end, uint8_t **out) {
    uint8_t *to = *out;
    for (;;) {
        while (end - data > VECTOR) {
            int plain = copy_plain(data, to);
            data += plain, to += plain;
            if (plain < VECTOR) break;
        }
        while (data < end && *data != 0xff && end - data <= VECTOR) *to++ = *data++;
        if (end - data < 2) return NULL;
        if (*data != 0xff) continue;
        if (data[1]) break;
        *to++ = 0xff;
        data += 2;
    }
    *out = to;
    return data;
}

/* The next bits are the highest of `bits`, of which `count` are valid. */
typedef struct {
    uint64_t bits;
    int count;
    const uint8_t *next;
} Reader;

INLINE void refill(Reader *reader) {
    uint64_t more;
    memcpy(&more, reader->next, 8);
    reader->bits |= __builtin_bswap64(more) >> reader->count;
    reader->next += (63 - reader->count) >> 3;
    reader->count |= 56;
}

INLINE void drop(Reader *reader, int count) {
    reader->bits <<= count;
    reader->count -= count;
}

/* Read a symbol whose code or extra bits `single` does not hold: its entry says how much is known.
 * Returns the symbol, or -1. The reader needs 31 bits and stands behind the code afterwards. */
static __attribute__((noinline)) int longest_symbol(uint64_t bits, const Table *table) {
    for (int length = LOOK + 1; length <= 16; length++) {
        int32_t code = (int32_t)(bits >> (64 - length));
        if (code <= table->most[length])
            return table->symbols[(code + table->first[length]) & 0xff] | length << 8;
    }
    return -1;
}

INLINE int long_symbol(Reader *reader, const Table *table, uint32_t entry) {
    int length = (int)(entry >> 8 & 0xff), symbol = (int)(entry >> 16 & 0xff);
    if (UNLIKELY(!length)) {
        symbol = longest_symbol(reader->bits, table);
        if (symbol < 0) return -1;
        length = symbol >> 8, symbol &= 0xff;
    }
    drop(reader, length);
    return symbol;
}

INLINE int extra(Reader *reader, int size) {
    int value = (int)(reader->bits >> (64 - size));
    drop(reader, size);
    return value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
}

/* Read the difference of a DC coefficient; leaves 25 bits. Returns 0 for an invalid code. */
INLINE int read_dc(Reader *reader, const Table *table, int32_t *predicted) {
    refill(reader);
    uint32_t entry = table->single[reader->bits >> (64 - LOOK)];
    if (LIKELY(entry & 0xff)) {
        drop(reader, entry & 63);
        *predicted += (int16_t)(entry >> 16);
        return 1;
    }
    int size = long_symbol(reader, table, entry);
    if (size < 0) return 0;
    if (size) *predicted += extra(reader, size);
    return 1;
}

/* Take a single symbol where `pair` or `leap` went too far, or nowhere. Returns the next place. */
INLINE int step(Reader *reader, const Table *table, int place, int16_t *block) {
    refill(reader);
    uint32_t entry = table->single[reader->bits >> (64 - LOOK)];
    int value = (int16_t)(entry >> 16);
    if (entry & 0xff) {
        place += (int)(entry >> 8 & 0xff);
        drop(reader, (int)(entry & 63));
    } else {
        int symbol = long_symbol(reader, table, entry);
        value = 0;
        if (LIKELY(symbol > 0 && symbol & 15)) {
            value = extra(reader, symbol & 15);
            place += symbol >> 4;
        } else {
            place += symbol == 0xf0 ? 15 : symbol ? NO_CODE : END_OF_BLOCK;
        }
    }
    if (block) block[dlio_zigzag[place]] = (int16_t)value;
    return place + 1;
}

/* Read the AC coefficients into a block of zeros. Returns 0 for invalid data. */
INLINE int read_ac(Reader *reader, const Table *table, int16_t *block) {
    const uint64_t *pair = table->pair;
    const uint8_t *at = dlio_zigzag + 1;
    for (;;) {
        Reader before;
        const uint8_t *from;
        do {
            refill(reader);
            for (int k = 0; k < 4; k++) {
                before = *reader, from = at;
                uint64_t entry = pair[reader->bits >> (64 - LOOK)];
                block[at[entry >> 8 & 0xff]] = (int16_t)(entry >> 32);
                block[at[entry >> 16 & 0xff]] = (int16_t)(entry >> 48);
                at += entry >> 24 & 0xff;
                drop(reader, (int)(entry & 63));
                if (at >= dlio_zigzag + 64) break;
            }
        } while (at < dlio_zigzag + 64);
        int64_t place = at - dlio_zigzag;
        if (LIKELY(place == 64 || (place > END_OF_BLOCK && place < END_OF_BLOCK + 64))) return 1;
        *reader = before;
        place = step(reader, table, (int)(from - dlio_zigzag), block);
        if (place >= 64) return place == 64 || place > END_OF_BLOCK;
        at = dlio_zigzag + place;
    }
}

/* Pass the AC coefficients of a block. Returns 0 for invalid data. */
INLINE int skip_ac(Reader *reader, const Table *table) {
    const uint16_t *leap = table->leap;
    int place = 1;
    for (;;) {
        Reader before;
        int from;
        do {
            refill(reader);
            for (int k = 0; k < 4; k++) {
                before = *reader, from = place;
                uint32_t entry = leap[reader->bits >> (64 - LEAP)];
                place += (int)(entry >> 6);
                drop(reader, entry & 63);
                if (place >= 64) break;
            }
        } while (place < 64);
        if (LIKELY(place == 64 || (place > LEAP_END && place < LEAP_END + 64))) return 1;
        *reader = before;
        place = step(reader, table, from, NULL);
        if (place >= 64) return place == 64 || place > END_OF_BLOCK;
    }
}

/* Decode or pass MCUs of one row. Returns the number of MCUs done. */
typedef struct {
    const Scan *scan;
    Reader reader;
    int32_t predicted[3];
} State;

INLINE int pass(State *state, int count, const uint8_t *limit) {
    const Header *header = state->scan->header;
    Reader reader = state->reader;
    for (int n = 0; n < count; n++) {
        if (UNLIKELY(reader.next > limit)) return 0;
        for (int c = 0; c < header->components; c++) {
            const Table *dc = state->scan->dc[c], *ac = state->scan->ac[c];
            int32_t predicted = state->predicted[c];
            for (int b = header->component[c].wide * header->component[c].high; b; b--) {
                if (UNLIKELY(!read_dc(&reader, dc, &predicted))) return 0;
                if (UNLIKELY(!skip_ac(&reader, ac))) return 0;
            }
            state->predicted[c] = predicted;
        }
    }
    state->reader = reader;
    return 1;
}

INLINE int decode(State *state, int column, int count, const uint8_t *limit) {
    const Scan *scan = state->scan;
    const Header *header = scan->header;
    Reader reader = state->reader;
    /* Per component two blocks, row by row; see inverse(). Of a component with one block in an MCU,
     * they are those of two MCUs. The last places take all that leads out of a block. */
    int16_t blocks[3][2 * 64 + 16] __attribute__((aligned(32)));
    for (int n = 0; n < count; n++, column++) {
        if (UNLIKELY(reader.next > limit)) return 0;
        for (int c = 0; c < header->components; c++) {
            const Table *dc = scan->dc[c], *ac = scan->ac[c];
            int wide = header->component[c].wide, high = header->component[c].high;
            size_t pitch = scan->pitch[c];
            uint8_t *plane = scan->planes[c] + (size_t)column * 8 * (size_t)wide;
            int32_t predicted = state->predicted[c];
            if (wide * high == 1) {
                int16_t *block = blocks[c] + (n & 1) * 8;
                if (!(n & 1)) clear(blocks[c]);
                if (UNLIKELY(!read_dc(&reader, dc, &predicted))) return 0;
                block[0] = (int16_t)predicted;
                if (UNLIKELY(!read_ac(&reader, ac, block))) return 0;
                if (n & 1)
                    inverse(blocks[c], scan->quant[c], plane - 8, plane, pitch, 1);
                else if (n + 1 == count)
                    inverse(blocks[c], scan->quant[c], plane, plane, pitch, 0);
            } else {
                size_t apart = wide == 2 ? 8 : 8 * pitch;
                for (int b = 0; b < wide * high; b += 2, plane += 8 * pitch) {
                    clear(blocks[c]);
                    for (int half = 0; half < 2; half++) {
                        int16_t *block = blocks[c] + half * 8;
                        if (UNLIKELY(!read_dc(&reader, dc, &predicted))) return 0;
                        block[0] = (int16_t)predicted;
                        if (UNLIKELY(!read_ac(&reader, ac, block))) return 0;
                    }
                    inverse(blocks[c], scan->quant[c], plane, plane + apart, pitch, 1);
                }
            }
            state->predicted[c] = predicted;
        }
    }
    state->reader = reader;
    return 1;
}

/* As decode(), at a fraction of the size. */
static int decode_small(State *state, int column, int count, const uint8_t *limit) {
    const Scan *scan = state->scan;
    const Header *header = scan->header;
    Reader reader = state->reader;
    int16_t block[2 * 64 + 16] __attribute__((aligned(32)));
    for (int n = 0; n < count; n++, column++) {
        if (UNLIKELY(reader.next > limit)) return 0;
        for (int c = 0; c < header->components; c++) {
            int wide = header->component[c].wide, high = header->component[c].high;
            int side = scan->sides[c];
            size_t pitch = scan->pitch[c];
            uint8_t *plane = scan->planes[c] + (size_t)(column * wide * side);
            for (int b = 0; b < wide * high; b++) {
                clear(block);
                if (UNLIKELY(!read_dc(&reader, scan->dc[c], &state->predicted[c]))) return 0;
                block[0] = (int16_t)state->predicted[c];
                if (UNLIKELY(!read_ac(&reader, scan->ac[c], block))) return 0;
                uint8_t *out = plane + (size_t)(b / wide * side) * pitch + (size_t)(b % wide * side);
                if (side == 8)
                    inverse(block, scan->quant[c], out, out, pitch, 0);
                else
                    inverse_small(block, scan->quant[c], side, out, pitch);
            }
        }
    }
    state->reader = reader;
    return 1;
}

/* Write the pixels of a decoded row of MCUs. */
static void write_row(const Scan *scan, int row) {
    const Header *header = scan->header;
    int mcu_height = header->mcu_height >> scan->shift;
    int first = row * mcu_height, last = first + mcu_height;
    int count = (scan->right - scan->left) * (header->mcu_width >> scan->shift);
    const Component *luma_of = header->component, *chroma_of = header->component + 1;
    /* 1 where chroma has half as many pixels as luma. */
    int down = luma_of->high * scan->sides[0] > chroma_of->high * scan->sides[1];
    int across = luma_of->wide * scan->sides[0] > chroma_of->wide * scan->sides[1];
    if (last > scan->last_row) last = scan->last_row;
    for (int y = first < scan->first_row ? scan->first_row : first; y < last; y++) {
        uint8_t *out = scan->out + (size_t)(y - scan->first_row) * scan->out_pitch;
        const uint8_t *luma = scan->planes[0] + (size_t)(y - first) * scan->pitch[0];
        if (header->components == 1) {
            grey_to_rgb(luma, out, count);
            continue;
        }
        size_t at = (size_t)((y - first) >> down) * scan->pitch[1];
        ycc_to_rgb(luma, scan->planes[1] + at, scan->planes[2] + at, out, count, across);
    }
}

int dlio_scan(const Scan *scan) {
    const Header *header = scan->header;
    int across = header->mcus_a_row;
    State state = {.scan = scan};
    for (size_t k = 0; k < scan->count; k++) {
        const Interval *interval = scan->intervals + k;
        const uint8_t *begin = scan->data + interval->begin, *end = scan->data + interval->end;
        const uint8_t *limit = end + 8; /* The reader is up to 8 bytes ahead. */
        state.reader = (Reader){0, 0, begin};
        memset(state.predicted, 0, sizeof state.predicted);
        for (uint32_t mcu = interval->from; mcu < interval->to;) {
            int row = (int)(mcu / (uint32_t)across), from = (int)(mcu % (uint32_t)across);
            int to = interval->to - mcu < (uint32_t)(across - from)
                         ? from + (int)(interval->to - mcu)
                         : across;
            mcu += (uint32_t)(to - from);
            if (row < scan->top || row >= scan->bottom) {
                if (!pass(&state, to - from, limit)) return IRREGULAR;
            } else {
                int left = scan->left < from ? from : scan->left > to ? to : scan->left;
                int right = scan->right < left ? left : scan->right > to ? to : scan->right;
                if (!pass(&state, left - from, limit)) return IRREGULAR;
                if (right > left) {
                    int is_done = scan->shift
                                      ? decode_small(&state, left - scan->left, right - left, limit)
                                      : decode(&state, left - scan->left, right - left, limit);
                    if (!is_done) return IRREGULAR;
                    if (right == scan->right) write_row(scan, row);
                }
                if (!pass(&state, to - right, limit)) return IRREGULAR;
            }
            for (int c = 0; c < 3; c++)
                if (state.predicted[c] > 1 << 24 || state.predicted[c] < -(1 << 24))
                    return IRREGULAR;
        }
        int64_t left = (end - state.reader.next) * 8 + state.reader.count;
        if (left < 0 || (left >= 8 && (scan->is_exact || k + 1 < scan->count))) return IRREGULAR;
    }
    return DONE;
}
