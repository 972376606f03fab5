/* The library's interface: the size of an image, and the pixels of a part of it. */
#include <string.h>

#include "jpeg.h"

#define EXPORT __attribute__((visibility("default")))

/* Multipliers of the fast inverse DCT, times 2**14: products of 1 and sqrt(2) cos(k pi / 16). */
static const uint16_t SCALES[64] = {
    16384, 22725, 21407, 19266, 16384, 12873, 8867,  4520, 22725, 31521, 29692, 26722, 22725,
    17855, 12299, 6270,  21407, 29692, 27969, 25172, 21407, 16819, 11585, 5906, 19266, 26722,
    25172, 22654, 19266, 15137, 10426, 5315,  16384, 22725, 21407, 19266, 16384, 12873, 8867,
    4520,  12873, 17855, 16819, 15137, 12873, 10114, 6967,  3552,  8867,  12299, 11585, 10426,
    8867,  6967,  4799,  2446,  4520,  6270,  5906,  5315,  4520,  3552,  2446,  1247,
};

/* Memory of a thread: begins with this. Zeros at first. */
typedef struct {
    uint32_t now; /* number of the call */
    Table tables[TABLES];
} Kept;

#ifdef DLIO_AVX2
static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
}
#else /* scan.c and resize.c are not built, and images are left to the other decoder. */
static int has_avx2(void) { return 0; }
int dlio_scan(const Scan *scan) { return NOT_MINE; }
const uint8_t *dlio_unstuff(const uint8_t *data, const uint8_t *end, uint8_t **out) { return NULL; }
void dlio_resize_rgb(const uint8_t *pixels, size_t pitch, Resize *size, uint8_t *memory,
                     uint8_t *out) {}
#endif

INLINE size_t aligned(size_t size) { return (size + 63) & ~(size_t)63; }

INLINE size_t pitch_of(const Header *header) {
    return aligned((size_t)header->mcus_a_row * (size_t)header->mcu_width + 64);
}

INLINE size_t intervals_of(const Header *header) {
    size_t mcus = (size_t)header->mcus_a_row * (size_t)header->mcu_rows;
    return header->interval ? (mcus - 1) / (size_t)header->interval + 1 : 1;
}

static size_t memory_of(const Header *header, size_t size) {
    size_t planes = pitch_of(header) * 16 * 3 + 64;
    return aligned(sizeof(Kept)) + aligned(size + PAD) + planes +
           aligned(intervals_of(header) * sizeof(Interval)) + 64;
}

/* Bytes of memory that a part of an image takes; 0 if it is left to the other decoder. */
size_t dlio_jpeg_memory(const Header *header, size_t size) {
    if (!has_avx2() || intervals_of(header) > size / 2 + 1) return 0; /* Each has a marker. */
    return memory_of(header, size);
}

/* Read an image's header.
 *
 * `shape` gets height, width and the width of an MCU in pixels, and the bytes of memory that
 * dlio_jpeg_crop needs. Returns 0, or NOT_MINE. */
EXPORT int dlio_jpeg_shape(const uint8_t *data, size_t size, int64_t shape[4]) {
    Header header;
    int refused = dlio_header(data, size, &header);
    if (refused) return refused;
    if (intervals_of(&header) > size / 2 + 1) return NOT_MINE; /* Each has a marker. */
    shape[0] = header.height, shape[1] = header.width, shape[2] = header.mcu_width;
    shape[3] = (int64_t)memory_of(&header, size);
    return DONE;
}

/* 1 if coded data that begin at `scan` have so many restart markers, in order, and then end. */
EXPORT int dlio_jpeg_ends(const uint8_t *data, size_t size, size_t scan, size_t restarts) {
    if (scan >= size) return 0;
    const uint8_t *at = data + scan, *last = data + size - 1;
    size_t count = 0;
    while (at < last && (at = memchr(at, 0xff, (size_t)(last - at)))) {
        int kind = *++at;
        if (kind == 0 || kind == 0xff) continue;
        if (count == restarts) return kind == 0xd9;
        if (kind != 0xd0 + (int)(count++ & 7)) return 0;
    }
    return 0;
}

/* Offsets of restart intervals by their lengths in the file, which are right if every marker is
 * where they say. Calls nothing for those outside of the part. Returns 1 if they are. */
static int by_lengths(const uint8_t *data, size_t size, const Header *header, Scan *scan,
                      Interval *intervals, uint8_t *out) {
    const uint8_t *at = data + header->starts + 4 + 9;
    size_t width = *at++, count = intervals_of(header);
    if ((width != 2 && width != 4) || header->scan_header - (size_t)(at - data) != width * count)
        return 0;
    int across = header->mcus_a_row / header->interval, row = 0, column = 0;
    int first = scan->left / header->interval, last = (scan->right - 1) / header->interval + 1;
    uint8_t *const begin = out;
    size_t begins = header->scan;
    for (size_t k = 0; k < count; k++, at += width) {
        size_t length = at[0] | (size_t)at[1] << 8;
        if (width == 4) length |= (size_t)at[2] << 16 | (size_t)at[3] << 24;
        if (length < 2 || length > size - begins) return 0;
        size_t ends = begins + length;
        int marker = k + 1 < count ? 0xd0 + (int)(k & 7) : 0xd9;
        if (data[ends - 2] != 0xff || data[ends - 1] != marker) return 0;
        if (row >= scan->top && row < scan->bottom && column >= first && column < last) {
            Interval *interval = intervals + scan->count++;
            interval->from = (uint32_t)k * (uint32_t)header->interval;
            interval->to = interval->from + (uint32_t)header->interval;
            interval->begin = (size_t)(out - begin);
            if (dlio_unstuff(data + begins, data + ends, &out) != data + ends - 2) return 0;
            interval->end = (size_t)(out - begin);
        }
        begins = ends;
        if (++column == across) column = 0, row++;
    }
    memset(out, 0, PAD);
    return 1;
}

/* Split the coded data at their restart markers, which have to be complete. */
static int by_markers(const uint8_t *data, size_t size, const Header *header, Scan *scan,
                      Interval *intervals, uint8_t *out) {
    const uint8_t *at = data + header->scan, *end = data + size;
    uint8_t *const begin = out;
    uint32_t total = (uint32_t)header->mcus_a_row * (uint32_t)header->mcu_rows;
    int across = header->mcus_a_row, interval = header->interval;
    int is_cut = interval && across % interval == 0;
    size_t count = intervals_of(header);
    for (size_t k = 0; k < count; k++) {
        Interval *each = intervals + scan->count;
        each->begin = (size_t)(out - begin);
        at = dlio_unstuff(at, end, &out);
        int marker = interval && k + 1 < count ? 0xd0 + (int)(k & 7) : 0xd9;
        if (!at || at[1] != marker) return IRREGULAR;
        at += 2;
        each->end = (size_t)(out - begin);
        each->from = (uint32_t)k * (uint32_t)interval;
        each->to = interval && total - each->from > (uint32_t)interval
                       ? each->from + (uint32_t)interval
                       : total;
        if (is_cut) {
            int row = (int)(each->from / (uint32_t)across);
            int column = (int)(each->from % (uint32_t)across);
            if (row < scan->top || row >= scan->bottom || column >= scan->right ||
                column + interval <= scan->left) {
                out = begin + each->begin; /* It is not needed. */
                continue;
            }
        }
        scan->count++;
    }
    /* The other decoder counts restart markers up to the end of the file. */
    while (interval && at < end && (at = memchr(at, 0xff, (size_t)(end - at))))
        if (++at < end && (*at & 0xf8) == 0xd0) return IRREGULAR;
    memset(out, 0, PAD);
    return DONE;
}

/* Pixels along a side of a component's blocks at a scale, as libjpeg has them: chroma of fewer samples
 * is shrunk less, as long as that makes it as large as luma in both directions. */
static int side_of(const Header *header, int c, int shift) {
    const Component *luma = header->component, *own = header->component + c;
    int side = 8 >> shift;
    while (side < 8 && luma->wide * (8 >> shift) % (own->wide * side * 2) == 0 &&
           luma->high * (8 >> shift) % (own->high * side * 2) == 0)
        side *= 2;
    return side;
}

static int prepare(const uint8_t *data, const Header *header, Scan *scan, Kept *kept) {
    kept->now++;
    for (int c = 0; c < header->components; c++) {
        const Component *component = header->component + c;
        scan->dc[c] =
            dlio_table(kept->tables, data + header->huffman[0][component->dc], 0, kept->now);
        scan->ac[c] =
            dlio_table(kept->tables, data + header->huffman[1][component->ac], 1, kept->now);
        if (!scan->dc[c] || !scan->ac[c]) return NOT_MINE;
        for (int k = 0; k < 64; k++) {
            int place = dlio_zigzag[k] / 16 * 8 + dlio_zigzag[k] % 16;
            int32_t step = header->quant[component->quant][k];
            /* The fast transform has a factor for each coefficient, the small ones have none. */
            scan->quant[c][place] = (int16_t)(
                scan->sides[c] == 8 ? (step * SCALES[place] + (1 << 11)) >> 12 : step);
        }
    }
    return DONE;
}

/* Decode a part of an image.
 *
 * box: top, left, height and width, in pixels.
 * memory: of this thread, `memory_size` bytes, zeros before the first call, the same in each.
 * out: RGB, `height` rows of whole MCUs that contain the columns of the box, without gaps between
 *   rows; followed by ROOM bytes that may be written.
 * Returns 0; NOT_MINE or IRREGULAR if another decoder has to read the image, or to find its fault;
 * BAD_CALL if the box or the memory does not fit. */
EXPORT int dlio_jpeg_crop(const uint8_t *data, size_t size, const int64_t box[4], uint8_t *memory,
                          size_t memory_size, uint8_t *out, size_t out_size) {
    Header header;
    int refused = dlio_header(data, size, &header);
    if (refused) return refused;
    return dlio_jpeg_part(data, size, &header, box, box, 0, memory, memory_size, out, out_size);
}

/* As dlio_jpeg_crop, of an image whose header is read, and at 1 / 2^shift of its size: `small` is the
 * part of the smaller image that is written, with whole MCUs of its columns. The rows of `box` are
 * decoded in any case, so that damage is found. */
int dlio_jpeg_part(const uint8_t *data, size_t size, const Header *header, const int64_t box[4],
                   const int64_t *small, int shift, uint8_t *memory, size_t memory_size,
                   uint8_t *out, size_t out_size) {
    if (!has_avx2()) return NOT_MINE;
    Scan scan = {.header = header, .out = out, .shift = shift};
    for (int c = 0; c < header->components; c++) scan.sides[c] = side_of(header, c, shift);
    int64_t top = box[0], left = box[1], bottom = top + box[2], right = left + box[3];
    if (top < 0 || left < 0 || bottom <= top || right <= left) return BAD_CALL;
    if (bottom > header->height || right > header->width) return BAD_CALL;
    scan.top = (int32_t)top / header->mcu_height;
    scan.bottom = ((int32_t)bottom - 1) / header->mcu_height + 1;
    int32_t high = header->mcu_height >> shift, wide = header->mcu_width >> shift;
    int64_t last = small[0] + small[2], end = small[1] + small[3];
    if (small[0] < 0 || small[1] < 0 || last <= small[0] || end <= small[1]) return BAD_CALL;
    if (last > (int64_t)header->mcu_rows * high || end > (int64_t)header->mcus_a_row * wide)
        return BAD_CALL;
    scan.first_row = (int32_t)small[0], scan.last_row = (int32_t)last;
    if (scan.first_row / high < scan.top) scan.top = scan.first_row / high;
    if ((scan.last_row - 1) / high + 1 > scan.bottom) scan.bottom = (scan.last_row - 1) / high + 1;
    scan.left = (int32_t)small[1] / wide;
    scan.right = ((int32_t)end - 1) / wide + 1;
    scan.out_pitch = (size_t)(scan.right - scan.left) * (size_t)wide * 3;
    size_t gap = (size_t)(-(intptr_t)memory & 63);
    if (intervals_of(header) > size / 2 + 1 || memory_size < memory_of(header, size) ||
        out_size < scan.out_pitch * (size_t)small[2] + ROOM)
        return BAD_CALL;
    memory += gap;
    Kept *kept = (Kept *)(void *)memory;
    uint8_t *coded = memory + aligned(sizeof(Kept));
    uint8_t *planes = coded + aligned(size + PAD);
    size_t pitch = pitch_of(header);
    for (int c = 0; c < 3; c++) {
        scan.pitch[c] = pitch;
        scan.planes[c] = planes + (size_t)c * 16 * pitch;
    }
    Interval *intervals = (Interval *)(void *)(planes + pitch * 16 * 3 + 64);
    int refused = prepare(data, header, &scan, kept);
    if (refused) return refused;
    int is_cut = header->interval && header->mcus_a_row % header->interval == 0;
    if (!(is_cut && header->starts &&
          by_lengths(data, size, header, &scan, intervals, coded))) {
        scan.count = 0;
        refused = by_markers(data, size, header, &scan, intervals, coded);
        if (refused) return refused;
    }
    scan.is_exact = header->interval || scan.bottom == header->mcu_rows;
    if (!header->interval) intervals->to = (uint32_t)header->mcus_a_row * (uint32_t)scan.bottom;
    scan.intervals = intervals, scan.data = coded;
    return dlio_scan(&scan);
}

/* Decode a whole image at 1 / 2^shift of its size, as dlio_jpeg_crop does a part at its full one. */
EXPORT int dlio_jpeg_small(const uint8_t *data, size_t size, int shift, uint8_t *memory,
                           size_t memory_size, uint8_t *out, size_t out_size) {
    Header header;
    int refused = dlio_header(data, size, &header);
    if (refused) return refused;
    if (shift < 0 || shift > 3) return BAD_CALL;
    int64_t over = (1 << shift) - 1;
    const int64_t box[4] = {0, 0, header.height, header.width};
    const int64_t small[4] = {0, 0, (header.height + over) >> shift, (header.width + over) >> shift};
    return dlio_jpeg_part(data, size, &header, box, small, shift, memory, memory_size, out,
                          out_size);
}

/* Resize RGB with bilinear interpolation.
 *
 * pitch: bytes from a row to the next.
 * sizes: height, width, height of the result, its width; 1 to mirror left and right; 1 to mirror top
 *   and bottom.
 * memory: at least 40 bytes for each column of the result, and 64; aligned as malloc's.
 * Returns 0; NOT_MINE without AVX2, or BAD_CALL. */
EXPORT int dlio_resize(const uint8_t *pixels, size_t pitch, const int64_t sizes[6], uint8_t *memory,
                       size_t memory_size, uint8_t *out) {
    for (int k = 0; k < 4; k++)
        if (sizes[k] < 1 || sizes[k] > 1 << 20) return BAD_CALL;
    Resize size = {.height = (int32_t)sizes[0], .width = (int32_t)sizes[1],
                   .rows = (int32_t)sizes[2],   .columns = (int32_t)sizes[3],
                   .flip = sizes[4] != 0,       .upend = sizes[5] != 0};
    if (pitch < (size_t)size.width * 3) return BAD_CALL;
    if (memory_size < (size_t)size.columns * 40 + 64) return BAD_CALL;
    if (!has_avx2()) return NOT_MINE;
    dlio_resize_rgb(pixels, pitch, &size, memory, out);
    return DONE;
}

/* Crops of many images in one call, so that the interpreter's lock is given up and taken once. */

/* A crop: of a JPEG, or of pixels that are decoded already. */
typedef struct {
    int64_t data, size; /* address and bytes of a JPEG; of the crop's first pixel, RGB, and 0 */
    int64_t pitch;      /* bytes from a row of pixels to the next; 0 for a JPEG */
    int64_t box[4];     /* top, left, height, width; of pixels the last two */
    int64_t rows, columns, flip, upend; /* of the result */
    int64_t out;        /* its address: RGB without gaps */
    int64_t refused;    /* 0, or why not */
} Task;

static int make(const Task *task, uint8_t *memory, size_t memory_size, uint8_t *pixels,
                size_t pixels_size, uint8_t *sums, size_t sums_size) {
    const uint8_t *from = (const uint8_t *)(uintptr_t)task->data;
    size_t pitch = (size_t)task->pitch;
    if (!task->pitch) {
        int64_t shape[4];
        int refused = dlio_jpeg_shape(from, (size_t)task->size, shape);
        if (!refused)
            refused = dlio_jpeg_crop(from, (size_t)task->size, task->box, memory, memory_size,
                                     pixels, pixels_size);
        if (refused) return refused;
        size_t mcu = (size_t)shape[2], left = (size_t)task->box[1];
        size_t right = (left + (size_t)task->box[3] - 1) / mcu * mcu + mcu;
        pitch = (right - left / mcu * mcu) * 3;
        from = pixels + left % mcu * 3;
    }
    const int64_t sizes[6] = {task->box[2], task->box[3], task->rows,
                              task->columns, task->flip, task->upend};
    return dlio_resize(from, pitch, sizes, sums, sums_size, (uint8_t *)(uintptr_t)task->out);
}

/* Decode and resize crops, as dlio_jpeg_crop and dlio_resize do one by one.
 *
 * memory, pixels, sums: of this thread, as theirs, large enough for each of the tasks.
 * Each task's `refused` becomes 0, or the reason that the two give; its result is undefined then. */
EXPORT void dlio_crops(Task *tasks, size_t count, uint8_t *memory, size_t memory_size,
                       uint8_t *pixels, size_t pixels_size, uint8_t *sums, size_t sums_size) {
    for (size_t k = 0; k < count; k++)
        tasks[k].refused =
            make(tasks + k, memory, memory_size, pixels, pixels_size, sums, sums_size);
}

/* Try the first pixel of `count` images: each verdict becomes 1 if the image is decoded here, so that
 * no part of it is an error; 0 if another decoder has to say. `memory` is of this thread, as theirs;
 * images that need more of it get 0, as do those of more than `most` pixels. */
EXPORT void dlio_jpeg_sound(const uint8_t *const *data, const size_t *sizes, size_t count,
                            int64_t most, uint8_t *memory, size_t memory_size, uint8_t *out,
                            size_t out_size, uint8_t *verdicts) {
    static const int64_t box[4] = {0, 0, 1, 1};
    for (size_t k = 0; k < count; k++) {
        Header header;
        verdicts[k] = !dlio_header(data[k], sizes[k], &header) &&
                      (int64_t)header.height * header.width <= most &&
                      !dlio_jpeg_part(data[k], sizes[k], &header, box, box, 0, memory, memory_size,
                                      out, out_size);
    }
}

/* Name the instructions in use; "none" where no image is decoded. */
EXPORT const char *dlio_jpeg_name(void) { return has_avx2() ? "AVX2" : "none"; }
