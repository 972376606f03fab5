/* Markers and Huffman tables. All that libjpeg would warn of, or read in another way, is refused. */
#include <string.h>

#include "jpeg.h"

/* (place / 8) * 16 + place % 8 of each coefficient: two blocks are interleaved row by row. */
#define P(row, column) ((row) * 16 + (column))
const uint8_t dlio_zigzag[320] = {
    P(0, 0), P(0, 1), P(1, 0), P(2, 0), P(1, 1), P(0, 2), P(0, 3), P(1, 2), P(2, 1), P(3, 0),
    P(4, 0), P(3, 1), P(2, 2), P(1, 3), P(0, 4), P(0, 5), P(1, 4), P(2, 3), P(3, 2), P(4, 1),
    P(5, 0), P(6, 0), P(5, 1), P(4, 2), P(3, 3), P(2, 4), P(1, 5), P(0, 6), P(0, 7), P(1, 6),
    P(2, 5), P(3, 4), P(4, 3), P(5, 2), P(6, 1), P(7, 0), P(7, 1), P(6, 2), P(5, 3), P(4, 4),
    P(3, 5), P(2, 6), P(1, 7), P(2, 7), P(3, 6), P(4, 5), P(5, 4), P(6, 3), P(7, 2), P(7, 3),
    P(6, 4), P(5, 5), P(4, 6), P(3, 7), P(4, 7), P(5, 6), P(6, 5), P(7, 4), P(7, 5), P(6, 6),
    P(5, 7), P(6, 7), P(7, 6), P(7, 7), [64 ... 319] = P(8, 0),
};
#undef P

static const char ROWS[] = "dlio-rows";

INLINE int word(const uint8_t *at) { return at[0] << 8 | at[1]; }

static int read_frame(const uint8_t *body, size_t size, Header *header) {
    if (size < 6 || header->components || body[0] != 8) return NOT_MINE;
    header->height = word(body + 1), header->width = word(body + 3);
    int components = body[5];
    if ((components != 1 && components != 3) || size != 6 + 3 * (size_t)components) return NOT_MINE;
    if (header->height < 1 || header->height > MOST_SIDE) return NOT_MINE;
    if (header->width < 1 || header->width > MOST_SIDE) return NOT_MINE;
    header->components = components;
    for (int k = 0; k < components; k++) {
        const uint8_t *at = body + 6 + 3 * k;
        Component *component = header->component + k;
        component->wide = at[1] >> 4, component->high = at[1] & 15, component->quant = at[2];
        int most = k == 0 && components == 3 ? 2 : 1;
        if (component->wide < 1 || component->wide > most) return NOT_MINE;
        if (component->high < 1 || component->high > most || component->quant > 3) return NOT_MINE;
    }
    header->mcu_height = 8 * header->component[0].high;
    header->mcu_width = 8 * header->component[0].wide;
    header->mcus_a_row = (header->width + header->mcu_width - 1) / header->mcu_width;
    header->mcu_rows = (header->height + header->mcu_height - 1) / header->mcu_height;
    return DONE;
}

static int read_quant(const uint8_t *body, size_t size, Header *header) {
    for (; size; body += 65, size -= 65) {
        if (size < 65 || body[0] > 3) return NOT_MINE; /* 16-bit tables, too */
        header->has_quant[body[0]] = 1;
        memcpy(header->quant[body[0]], body + 1, 64);
    }
    return DONE;
}

static int read_huffman(const uint8_t *data, const uint8_t *body, size_t size, Header *header) {
    while (size) {
        int number = 0;
        if (size < 17 || (body[0] & ~0x10) > 3) return NOT_MINE;
        for (int k = 1; k <= 16; k++) number += body[k];
        if (number > 256 || size < 17 + (size_t)number) return NOT_MINE;
        header->huffman[body[0] >> 4][body[0] & 3] = (size_t)(body + 1 - data);
        body += 17 + number, size -= 17 + (size_t)number;
    }
    return DONE;
}

/* `ids` are the components' of the frame, 3 bytes apart. */
static int read_scan(const uint8_t *body, size_t size, Header *header, const uint8_t *ids) {
    int count = header->components;
    if (!count || size != 4 + 2 * (size_t)count || body[0] != count) return NOT_MINE;
    for (int k = 0; k < count; k++) {
        const uint8_t *at = body + 1 + 2 * k;
        Component *component = header->component + k;
        component->dc = at[1] >> 4, component->ac = at[1] & 15;
        if (at[0] != ids[3 * k] || component->dc > 3 || component->ac > 3) return NOT_MINE;
        for (int j = 0; j < k; j++)
            if (ids[3 * j] == ids[3 * k]) return NOT_MINE;
        if (!header->has_quant[component->quant]) return NOT_MINE;
        if (!header->huffman[0][component->dc]) return NOT_MINE;
        if (!header->huffman[1][component->ac]) return NOT_MINE;
    }
    const uint8_t *rest = body + 1 + 2 * count;
    return rest[0] == 0 && rest[1] == 63 && rest[2] == 0 ? DONE : NOT_MINE;
}

/* Read the header of a baseline JPEG with one scan, in grey or in YCbCr. */
int dlio_header(const uint8_t *data, size_t size, Header *header) {
    memset(header, 0, sizeof *header);
    if (size < 4 || data[0] != 0xff || data[1] != 0xd8) return NOT_MINE;
    const uint8_t *ids = NULL;
    int is_ycc = 0, refused = DONE, profile = 0, profiles = 0; /* parts of an ICC profile */
    for (size_t at = 2; at + 4 <= size;) {
        int marker = data[at + 1];
        size_t length = (size_t)word(data + at + 2);
        if (data[at] != 0xff || length < 2 || length > size - at - 2) return NOT_MINE;
        const uint8_t *body = data + at + 4;
        size_t rest = length - 2, starts = 0;
        if (marker == 0xc0 || marker == 0xc1) {
            refused = read_frame(body, rest, header);
            ids = body + 6;
        } else if (marker == 0xc4) {
            refused = read_huffman(data, body, rest, header);
        } else if (marker == 0xdb) {
            refused = read_quant(body, rest, header);
        } else if (marker == 0xdd) {
            if (rest != 2) return NOT_MINE;
            header->interval = word(body);
        } else if (marker == 0xda) {
            refused = ids ? read_scan(body, rest, header, ids) : NOT_MINE;
            if (refused) return refused;
            int plain = header->components == 1 || (ids[0] == 1 && ids[3] == 2 && ids[6] == 3);
            header->scan_header = at, header->scan = at + 2 + length;
            return profile == profiles && (plain || is_ycc) ? DONE : NOT_MINE;
        } else if (marker == 0xe0) {
            if (rest >= 5 && !memcmp(body, "JFIF", 5)) {
                if (rest >= 14 && body[5] != 1) return NOT_MINE; /* libjpeg warns. */
                is_ycc |= rest >= 14;
            }
        } else if (marker == 0xee) {
            /* Three components may be RGB, and libjpeg warns of an unknown transform. */
            if (rest >= 5 && !memcmp(body, "Adobe", 5)) {
                if (rest < 12 || body[11] != 1) return NOT_MINE;
            }
        } else if (marker == 0xe2) {
            /* libjpeg-turbo warns of parts that are not complete, and of empty ones. */
            if (rest >= 14 && !memcmp(body, "ICC_PROFILE", 12)) {
                if (rest == 14 || body[12] != ++profile || (profiles && body[13] != profiles))
                    return NOT_MINE;
                profiles = body[13];
            }
        } else if (marker == 0xe9) {
            if (rest > sizeof ROWS && !memcmp(body, ROWS, sizeof ROWS - 1)) starts = at;
        } else if ((marker & 0xf0) != 0xe0 && marker != 0xfe) {
            return NOT_MINE;
        }
        if (refused) return refused;
        header->starts = starts; /* It counts only as the last segment before the scan. */
        at += 2 + length;
    }
    return NOT_MINE;
}

INLINE int extended(int value, int size) {
    return size && value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
}

static void fill_single(Table *table, uint32_t code, int length, int symbol) {
    int size = table->is_ac ? symbol & 15 : symbol, zeros = table->is_ac ? symbol >> 4 : 0;
    int rest = LOOK - length - size;
    uint32_t *to = table->single + (code << (LOOK - length));
    if (rest < 0) {
        for (int k = 0; k < 1 << (LOOK - length); k++) to[k] = (uint32_t)(length << 8 | symbol << 16);
        return;
    }
    if (table->is_ac && !size && zeros != 15) zeros = symbol ? NO_CODE : END_OF_BLOCK;
    for (int value = 0; value < 1 << size; value++) {
        uint32_t entry = (uint32_t)(length + size) | (uint32_t)zeros << 8 |
                         (uint32_t)extended(value, size) << 16;
        for (int k = 0; k < 1 << rest; k++) *to++ = entry;
    }
}

/* Fill `pair`: the entry of the first symbol, plus that of the second in the bits that are left. */
static void fill_pair(Table *table) {
    uint64_t seconds[2 << LOOK]; /* for n bits from 1 << n on, where it is made */
    uint32_t is_made = 0;
    for (uint32_t k = 0; k < 1 << LOOK;) {
        uint32_t one = table->single[k], bits = one & 0xff;
        uint64_t zeros = one >> 8 & 0xff, next = zeros + 1;
        if (!bits || zeros == NO_CODE) {
            table->pair[k++] = (uint64_t)(64 << 8 | 64 << 16 | (uint32_t)PAIR_NONE << 24);
            continue;
        }
        uint32_t left = LOOK - bits, span = 1u << left;
        if (zeros == END_OF_BLOCK) {
            uint64_t entry = bits | 64 << 8 | 64 << 16 | (uint64_t)END_OF_BLOCK << 24;
            for (uint32_t j = 0; j < span; j++) table->pair[k + j] = entry;
            k += span;
            continue;
        }
        uint64_t *second = seconds + span;
        for (uint32_t j = 0; !(is_made >> left & 1) && j < span; j++) {
            uint32_t two = table->single[j << bits];
            uint64_t more = two & 0xff, then = two >> 8 & 0xff;
            if (!more || more > left || then == NO_CODE)
                second[j] = 0;
            else if (then == END_OF_BLOCK)
                second[j] = more | (uint64_t)END_OF_BLOCK << 24;
            else
                second[j] = more | then << 16 | (then + 1) << 24 | (uint64_t)(two >> 16) << 48;
        }
        is_made |= 1u << left;
        uint64_t first = bits | zeros << 8 | next << 16 | next << 24 | (uint64_t)(one >> 16) << 32;
        for (uint32_t j = 0; j < span; j++) table->pair[k + j] = first + second[j];
        k += span;
    }
}

/* Fill `leap`: the same for all numbers of bits up to LEAP, each made of those of fewer bits. */
static void fill_leap(Table *table) {
    uint16_t made[2 << LEAP]; /* for n bits from 1 << n on */
    memset(made, 0, sizeof made);
    for (int bits = 1; bits <= LEAP; bits++) {
        uint16_t *to = made + (1 << bits);
        uint32_t code = 0;
        const uint8_t *symbol = table->symbols;
        for (int length = 1; length <= bits; length++, code <<= 1) {
            for (int n = table->counts[length]; n; n--, code++, symbol++) {
                int size = *symbol & 15, passed = (*symbol >> 4) + 1, all = length + size;
                if (all > bits || (!size && *symbol && *symbol != 0xf0)) continue;
                uint16_t *range = to + (code << (bits - length));
                if (!*symbol) {
                    for (int k = 0; k < 1 << (bits - length); k++)
                        range[k] = (uint16_t)(length | LEAP_END << 6);
                    continue;
                }
                int rest = 1 << (bits - all);
                uint16_t more = (uint16_t)(all | passed << 6);
                const uint16_t *then = made + rest;
                for (int k = 0; k < rest; k++) range[k] = (uint16_t)(then[k] + more);
                for (int k = 1; k < 1 << size; k++)
                    memcpy(range + (size_t)k * (size_t)rest, range, (size_t)rest * 2);
            }
        }
    }
    const uint16_t *last = made + (1 << LEAP);
    for (int k = 0; k < 1 << LEAP; k++) table->leap[k] = last[k] ? last[k] : LEAP_NONE << 6;
}

static int make_table(Table *table, const uint8_t *counts, int number, int is_ac) {
    table->is_ac = -1;
    table->number = number;
    table->counts[0] = 0;
    memcpy(table->counts + 1, counts, 16);
    memcpy(table->symbols, counts + 16, (size_t)number);
    int32_t code = 0, index = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        int here = table->counts[length];
        if (code + here > 1 << length) return 0;
        table->first[length] = index - code;
        code += here, index += here;
        table->most[length] = here ? code - 1 : -1;
    }
    for (int k = 0; !is_ac && k < number; k++)
        if (table->symbols[k] > 15) return 0;
    table->is_ac = is_ac;
    memset(table->single, 0, sizeof table->single);
    code = 0, index = 0;
    for (int length = 1; length <= LOOK; length++, code <<= 1)
        for (int n = table->counts[length]; n; n--)
            fill_single(table, (uint32_t)code++, length, table->symbols[index++]);
    if (is_ac) fill_pair(table), fill_leap(table);
    return 1;
}

/* Find or make a table. `counts` is followed by the symbols. The tables of this call, that is with
 * `used == now`, are kept. Returns NULL for an invalid one. */
const Table *dlio_table(Table *tables, const uint8_t *counts, int is_ac, uint32_t now) {
    int number = 0;
    for (int k = 0; k < 16; k++) number += counts[k];
    if (!number) return NULL;
    Table *oldest = tables;
    for (Table *each = tables; each < tables + TABLES; each++) {
        if (each->is_ac == is_ac && each->number == number && !memcmp(each->counts + 1, counts, 16) &&
            !memcmp(each->symbols, counts + 16, (size_t)number)) {
            each->used = now;
            return each;
        }
        if (now - each->used > now - oldest->used) oldest = each;
    }
    if (!make_table(oldest, counts, number, is_ac)) return NULL;
    oldest->used = now;
    return oldest;
}
