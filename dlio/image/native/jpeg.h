/* Baseline JPEGs, as far as a crop needs them. Internal to dlio/image/native; see README.md. */
#ifndef DLIO_JPEG_H
#define DLIO_JPEG_H

#include <stddef.h>
#include <stdint.h>

#if !defined(__GNUC__)
#error "GCC or Clang is needed: dlio works without this library, too"
#endif
#define INLINE static inline __attribute__((always_inline))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

enum {
    LOOK = 11,   /* bits of an index of `Table.single` */
    LEAP = 12,   /* bits of an index of `Table.leap` */
    TABLES = 12, /* Huffman tables that a thread keeps, most of which many files share */
    PAD = 2048,  /* zero bytes behind coded data: more than one MCU can consume */
    ROOM = 128,  /* bytes behind the pixels that may be written */
    MOST_SIDE = 65500,
    END_OF_BLOCK = 192, /* `Table.single`: added to the place in a block by an end of block */
    NO_CODE = 80,       /* ... and by a code that is not valid; both lead out of it */
    PAIR_NONE = 255,    /* `Table.pair`: the next place where not even one symbol fits */
    LEAP_END = 512,     /* `Table.leap`: coefficients passed by an end of block, */
    LEAP_NONE = 900     /* and where not even one symbol fits */
};

/* Reasons to leave an image to the other decoder; 0 is success. */
enum { DONE = 0, NOT_MINE = 1, IRREGULAR = 2, BAD_CALL = 3 };

/* A Huffman table.
 *
 * single: per LOOK bits, the symbol they begin with. If its code and its extra bits fit:
 *   bits 0-7 the bits of both, 8-15 the number of zeros before the value, 16-31 the value.
 *   Otherwise bits 0-7 are 0, 8-15 the bits of the code (0: more than LOOK), 16-23 the symbol.
 * pair: per LOOK bits, up to two symbols that they hold whole: bits 0-7 the bits of these, 8-15 and
 *   16-23 the places of their values, 24-31 the next place, 32-47 and 48-63 the values. Places
 *   count from the next place before.
 * leap: per LEAP bits, all symbols that they hold whole: bits 0-5 the bits of these, 6-15 the
 *   coefficients that they pass.
 * DC has `single` alone. Counts of bits are lowest, as processors take a shift from there.
 */
typedef struct {
    uint64_t pair[1 << LOOK];
    uint32_t single[1 << LOOK];
    uint16_t leap[1 << LEAP];
    int32_t most[17];  /* largest code of each length; -1 without */
    int32_t first[17]; /* index of its first symbol minus its first code */
    uint8_t counts[17];
    uint8_t symbols[256];
    int number; /* of symbols */
    int is_ac;  /* -1: no table is here */
    uint32_t used;
} Table;

typedef struct {
    int wide, high;   /* sampling factors */
    int dc, ac, quant; /* numbers of tables */
} Component;

/* A parsed header. */
typedef struct {
    int32_t height, width;
    int32_t components;
    Component component[3];
    int32_t mcu_height, mcu_width; /* pixels */
    int32_t mcus_a_row, mcu_rows;
    int32_t interval; /* MCUs between restart markers; 0 without */
    size_t scan;      /* offset of the coded data */
    size_t scan_header;
    size_t starts;    /* offset of the segment with the lengths of restart intervals, or 0 */
    uint8_t has_quant[4];
    uint8_t quant[4][64]; /* zigzag */
    size_t huffman[2][4]; /* offset of each table's counts; 0 without */
} Header;

/* Coded data without stuffed bytes: MCUs `from` to `to`, between two restart markers. */
typedef struct {
    uint32_t from, to;
    size_t begin, end; /* offsets in `Scan.data` */
} Interval;

/* All that decoding one crop needs. */
typedef struct {
    const Header *header;
    const Table *dc[3], *ac[3];
    int16_t quant[3][64] __attribute__((aligned(32)));
    const uint8_t *data;
    const Interval *intervals;
    size_t count;
    int is_exact; /* the last interval has to end with its data */
    int32_t top, bottom, left, right; /* MCUs that are decoded */
    int32_t first_row, last_row;      /* rows of pixels that are written, at the scale */
    int shift;                        /* pixels are made at 1 / 2^shift of the size */
    int sides[3];                     /* pixels along a side of each component's blocks */
    uint8_t *planes[3];
    size_t pitch[3]; /* bytes of a row of each plane */
    uint8_t *out;
    size_t out_pitch;
} Scan;

typedef struct {
    int32_t height, width; /* of the image, in pixels */
    int32_t rows, columns; /* of the result */
    int flip, upend;
    int32_t begin, end; /* see lay_out() in resize.c */
} Resize;

/* With AVX2; see has_avx2() in crop.c. */
int dlio_scan(const Scan *scan);
void dlio_resize_rgb(const uint8_t *pixels, size_t pitch, Resize *size, uint8_t *memory,
                     uint8_t *out);

/* Copy coded data up to the next marker, without stuffed bytes. Writes up to 31 bytes more than it
 * says. Returns the marker's place and moves `out` behind the copy; NULL without a marker. */
const uint8_t *dlio_unstuff(const uint8_t *data, const uint8_t *end, uint8_t **out);

/* Order of coefficients; places behind the last lead to a place that is not read. */
extern const uint8_t dlio_zigzag[320];

size_t dlio_jpeg_memory(const Header *header, size_t size);
int dlio_jpeg_part(const uint8_t *data, size_t size, const Header *header, const int64_t box[4],
                   const int64_t *small, int shift, uint8_t *memory, size_t memory_size, uint8_t *out, size_t out_size);

int dlio_header(const uint8_t *data, size_t size, Header *header);
const Table *dlio_table(Table *tables, const uint8_t *counts, int is_ac, uint32_t now);

#endif
