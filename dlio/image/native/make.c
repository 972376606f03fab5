/* One sample of a batch: read, checked, expanded, and put into the batch. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "jpeg.h"
#include "png.h"
#include "pool.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    MOST = 0x7fffffff, /* bytes of a payload: MAX_SAMPLE_BYTES of dlio/storage/block.py */
    PART = 1 << 19,    /* bytes that are read and checked while the cache has them */
    LARGE = 4096       /* bytes of a field that is read into the batch itself */
};

/* Functions of the libraries xxhash and lz4, which their Python packages bring. */
static struct {
    uint64_t (*digest)(const void *, size_t);
    void *(*create)(void);
    int (*release)(void *), (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*end)(const void *);
    int (*expand)(const char *, char *, int, int);
} libraries;

/* Take addresses of XXH3_64bits, XXH3_createState, XXH3_freeState, XXH3_64bits_reset, _update and
 * _digest, and of LZ4_decompress_safe. Called once, before any pool. */
EXPORT void dlio_pool_use(const int64_t addresses[7]) {
    memcpy(&libraries, addresses, sizeof libraries);
}

INLINE int reserve(uint8_t **memory, size_t *size, size_t wanted) {
    if (*size >= wanted) return 1;
    size_t more = wanted + wanted / 4 + 4096;
    free(*memory);
    /* Zeros, as the decoder's memory has to begin. */
    *memory = calloc(1, more);
    *size = *memory ? more : 0;
    return *memory != NULL;
}

void dlio_thread_end(Thread *thread) {
    dlio_thread_rest(thread);
    free(thread->packed), free(thread->raw), free(thread->memory);
    free(thread->pixels), free(thread->sums), free(thread->crop);
}

/* Read a payload that lies in parts. Returns 0 if one cannot be read. */
static int join(const Sample *sample, uint8_t *into) {
    const Place *place = (const Place *)(uintptr_t)sample->offset;
    for (int64_t at = 0; at < sample->raw; at += place->bytes, place++) {
        if (place->bytes < 1 || place->bytes > sample->raw - at) return 0;
        if (place->descriptor == IN_MEMORY)
            memcpy(into + at, (const void *)(uintptr_t)place->offset, (size_t)place->bytes);
        else if (place->descriptor == IN_FOLDER) {
            const NamedFile *named = (const NamedFile *)(uintptr_t)place->offset;
            if (!dlio_read_named(named, into + at, (size_t)place->bytes)) return 0;
        } else if (!dlio_read_all((int)place->descriptor, into + at, (size_t)place->bytes,
                                place->offset))
            return 0;
    }
    return 1;
}

/* Read and check a payload, of which so many bytes are wanted, into `into` unless it is in memory; `at`
 * gets where it lies. */
static int fetch(const Sample *sample, int64_t wanted, Thread *thread, uint8_t *into,
                 const uint8_t **at) {
    size_t stored = (size_t)sample->stored, raw = (size_t)sample->raw;
    const uint8_t *data = (const uint8_t *)(uintptr_t)sample->offset;
    int is_last = 0;
    if (sample->descriptor == IN_PARTS) {
        if (stored != raw || !join(sample, into)) return UNREADABLE;
        data = into;
    } else if (sample->descriptor != IN_MEMORY)
        data = dlio_in_place(sample, wanted, 0, sample->stored,
                             sample->checked ? &is_last : NULL, thread);
    if (!data || is_last) {
        uint8_t *target = into;
        if (stored != raw) {
            if (!reserve(&thread->packed, &thread->packed_size, stored)) return UNREADABLE;
            target = thread->packed;
        }
        if (is_last)
            memcpy(target, data, stored);
        else {
            int file = dlio_file_of(sample, thread);
            if (file < 0 || !dlio_read_all(file, target, stored, sample->offset)) return UNREADABLE;
        }
        data = target;
    }
    if (sample->checked == STORED && libraries.digest(data, stored) != sample->digest) return DAMAGED;
    if (stored != raw) {
        int count = libraries.expand((const char *)data, (char *)into, (int)stored, (int)raw);
        if (count != (int)raw) return DAMAGED;
        data = into;
    }
    if (sample->checked == 1 && libraries.digest(data, raw) != sample->digest) return DAMAGED;
    *at = data;
    return MADE;
}

/* Read payloads to their slots, which are offsets in `memory`, each followed by zeros up to a multiple of
 * 8 bytes. A sample that is read gets its digest. Takes no thread of a pool: it reads in the caller's. */
EXPORT void dlio_payloads(Sample *samples, int64_t count, uint8_t *memory) {
    Files files = {0};
    Thread thread = {.files = &files, .folder = -1, .block = -1, .file = -1};
    for (Sample *sample = samples; sample < samples + count; sample++) {
        uint8_t *into = memory + sample->slot;
        const uint8_t *at = into;
        size_t bytes = (size_t)sample->raw;
        sample->state = fetch(sample, sample->raw, &thread, into, &at);
        if (sample->state != MADE) continue;
        if (at != into) memcpy(into, at, bytes);
        memset(into + bytes, 0, -bytes & 7);
        sample->digest = libraries.digest(into, bytes);
    }
    dlio_thread_end(&thread);
}

INLINE double from_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 0    ? ldexp(fraction, -24)
                   : exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : ldexp(fraction + 1024, exponent - 25);
    return bits >> 15 ? -value : value;
}

#define CAST(type, wide)                                                                           \
    {                                                                                              \
        type value;                                                                                \
        memcpy(&value, from, sizeof value);                                                        \
        wide made = (wide)value;                                                                   \
        memcpy(to, &made, sizeof made);                                                            \
        return 1;                                                                                  \
    }

/* Copy a field, or make int64 or double of a number, as Python's are in tensors. Returns 0 for a
 * number that does not fit. The numbers of casts are those of batch_pool.py. */
static int cast_into(int64_t cast, const uint8_t *from, int64_t bytes, uint8_t *to) {
    switch (cast) {
    case 0: memcpy(to, from, (size_t)bytes); return 1;
    case 1: CAST(int8_t, int64_t)
    case 2: CAST(int16_t, int64_t)
    case 3: CAST(int32_t, int64_t)
    case 4: CAST(uint8_t, int64_t)
    case 5: CAST(uint16_t, int64_t)
    case 6: CAST(uint32_t, int64_t)
    case 7:
        if (from[7] & 0x80) return 0;
        memcpy(to, from, 8);
        return 1;
    case 8: CAST(float, double)
    case 9: {
        uint16_t half;
        memcpy(&half, from, 2);
        double made = from_half(half);
        memcpy(to, &made, 8);
        return 1;
    }
    case 10: *to = *from != 0; return 1;
    }
    return 0;
}

INLINE uint8_t *slot_of(const Job *job, int64_t column, int64_t slot) {
    return job->columns[column] + slot * job->recipe->column[column].stride;
}

static int scatter(const Job *job, const Sample *sample, const uint8_t *payload, int64_t least) {
    const Recipe *recipe = job->recipe;
    for (int64_t c = 0; c < recipe->count; c++) {
        const Column *column = recipe->column + c;
        if (column->bytes < least || column->cast)
            if (!cast_into(column->cast, payload + column->at, column->bytes,
                           slot_of(job, c, sample->slot)))
                return UNKNOWN;
    }
    return MADE;
}

/* Read large fields into the batch itself, part by part, and what is between them into `raw`. */
static int stream(const Job *job, const Sample *sample, Thread *thread) {
    const Recipe *recipe = job->recipe;
    int file = dlio_file_of(sample, thread);
    void *hash = NULL;
    if (file < 0 || (sample->checked && !(hash = libraries.create()))) return UNREADABLE;
    if (hash) libraries.reset(hash);
    int64_t at = 0, c = 0;
    int state = MADE;
    while (state == MADE && at < sample->raw) {
        while (c < recipe->count &&
               (recipe->column[c].cast || recipe->column[c].bytes < LARGE || recipe->column[c].at < at))
            c++;
        int64_t end = sample->raw;
        uint8_t *into = thread->raw + at;
        if (c < recipe->count) {
            const Column *column = recipe->column + c;
            if (column->at == at) {
                into = slot_of(job, c, sample->slot);
                end = at + column->bytes;
            } else
                end = column->at;
        }
        while (at < end) {
            size_t part = (size_t)(end - at < PART ? end - at : PART);
            if (!dlio_read_all(file, into, part, sample->offset + at)) {
                state = UNREADABLE;
                break;
            }
            if (hash) libraries.update(hash, into, part);
            into += part, at += (int64_t)part;
        }
    }
    if (hash) {
        if (state == MADE && libraries.end(hash) != sample->digest) state = DAMAGED;
        libraries.release(hash);
    }
    return state == MADE ? scatter(job, sample, thread->raw, LARGE) : state;
}

/* Crops, with the numbers of dlio/image/crop.py to the last bit: this file is compiled without
 * fused operations, and exp() is the one that Python calls. */

enum { TRIES = 10, TOP = 2 * TRIES, LEFT, FLIP, UPEND };

typedef struct { int64_t part[4], flip, upend; } Box; /* top, left, height, width */

static void middle(const CropRule *rule, int64_t height, int64_t width, Box *box) {
    int64_t shorter = height < width ? height : width;
    int64_t side = rule->rows < rule->columns ? rule->rows : rule->columns;
    double scale = rule->resize ? (double)shorter / (double)rule->resize
                                : (double)(shorter * 7) / (double)(8 * side);
    double h = rint((double)rule->rows * scale), w = rint((double)rule->columns * scale);
    box->part[2] = h < 1 ? 1 : h > (double)height ? height : (int64_t)h;
    box->part[3] = w < 1 ? 1 : w > (double)width ? width : (int64_t)w;
}

static void longest(const CropRule *rule, int64_t height, int64_t width, Box *box) {
    double shape = (double)width / (double)height;
    box->part[2] = height, box->part[3] = width;
    if (shape < rule->ratio[0]) {
        double h = rint((double)width / rule->ratio[0]);
        if (h < (double)height) box->part[2] = (int64_t)h;
    } else if (shape > rule->ratio[1]) {
        double w = rint((double)height * rule->ratio[1]);
        if (w < (double)width) box->part[3] = (int64_t)w;
    }
}

static void draw(const CropRule *rule, const double *u, int64_t height, int64_t width, Box *box) {
    box->flip = box->upend = 0;
    if (rule->train) {
        box->flip = u[FLIP] < rule->flip, box->upend = u[UPEND] < rule->upend;
        double area = (double)(height * width);
        for (int k = 0; k < TRIES; k++) {
            double target = area * (rule->scale[0] + (rule->scale[1] - rule->scale[0]) * u[2 * k]);
            double ratio = exp(rule->log_ratio[0] +
                               (rule->log_ratio[1] - rule->log_ratio[0]) * u[2 * k + 1]);
            double w = rint(sqrt(target * ratio)), h = rint(sqrt(target / ratio));
            if (!(w > 0 && w <= (double)width && h > 0 && h <= (double)height)) continue;
            box->part[2] = (int64_t)h, box->part[3] = (int64_t)w;
            box->part[0] = (int64_t)(u[TOP] * (double)(height - box->part[2] + 1));
            box->part[1] = (int64_t)(u[LEFT] * (double)(width - box->part[3] + 1));
            return;
        }
        longest(rule, height, width, box);
    } else
        middle(rule, height, width, box);
    box->part[0] = (height - box->part[2]) / 2, box->part[1] = (width - box->part[3]) / 2;
}

/* The parts of many images, for tests: `sizes` has height and width of each, `uniforms` UPEND + 1
 * numbers, and `boxes` gets top, left, height, width, flip and upend. */
EXPORT void dlio_boxes(const CropRule *rule, int64_t count, const int64_t *sizes,
                       const double *uniforms, int64_t *boxes) {
    for (int64_t k = 0; k < count; k++) {
        Box box;
        draw(rule, uniforms + k * (UPEND + 1), sizes[2 * k], sizes[2 * k + 1], &box);
        memcpy(boxes + 6 * k, &box, sizeof box);
    }
}

/* The fraction of its size at which an image is decoded for a part, as a power of 2: the smallest that
 * leaves as many pixels as the crop has. */
static int shift_of(const CropRule *rule, const Box *box) {
    for (int shift = 3; shift; shift--)
        if (box->part[2] >= rule->rows << shift && box->part[3] >= rule->columns << shift)
            return shift;
    return 0;
}

/* The part of the smaller image: `scaled` of dlio/image/decoder.py. The other decoder ends the image
 * with the MCUs of the part's last row, or cuts restart intervals out, and the part ends there. */
static void shrink(const Header *header, const Box *box, int shift, int64_t part[4]) {
    memcpy(part, box->part, 4 * sizeof *part);
    if (!shift) return;
    double factor = (double)(1 << shift);
    int64_t sides[2] = {header->height, header->width}, interval = header->interval;
    int is_cut = interval && header->mcus_a_row % interval == 0;
    int64_t unit[2] = {header->mcu_height, header->mcu_width * interval};
    for (int k = 0; k < 2; k++) {
        if (is_cut || (k == 0 && !interval)) {
            int64_t end = box->part[k] + box->part[k + 2];
            end = (end + unit[k] - 1) / unit[k] * unit[k];
            if (end < sides[k]) sides[k] = end;
        }
        int64_t side = (sides[k] + (1 << shift) - 1) >> shift;
        part[k] = (int64_t)rint((double)box->part[k] / factor);
        part[k + 2] = (int64_t)rint((double)box->part[k + 2] / factor);
        if (part[k + 2] > side - part[k]) part[k + 2] = side - part[k];
        if (part[k + 2] < 1) part[k + 2] = 1;
    }
}

#define SPREAD(type)                                                                               \
    for (size_t k = 0; k < pixels; k++)                                                            \
        for (size_t c = 0; c < 3; c++)                                                             \
            ((type *)(void *)into)[3 * k + c] = ((const type *)(const void *)values)[256 * c + from[3 * k + c]];

/* Write numbers in place of bytes. Python's `values` are what torch makes of each byte. */
static void spread(const uint8_t *from, size_t pixels, const uint8_t *values, int64_t wide,
                   uint8_t *into) {
    switch (wide) {
    case 2: SPREAD(uint16_t) break;
    case 4: SPREAD(uint32_t) break;
    case 8: SPREAD(uint64_t) break;
    }
}

/* Resize a part of an image into its slot. Returns 0 without memory. */
static int put(const Job *job, int64_t slot, const uint8_t *from, size_t pitch, const int64_t part[4],
               const Box *box, Thread *thread) {
    const Recipe *recipe = job->recipe;
    const CropRule *rule = &recipe->rule;
    size_t pixels = (size_t)rule->rows * (size_t)rule->columns;
    uint8_t *into = job->images[slot];
    if (!reserve(&thread->sums, &thread->sums_size, (size_t)rule->columns * 40 + 64)) return 0;
    if (recipe->values) {
        if (!reserve(&thread->crop, &thread->crop_size, pixels * 3 + ROOM)) return 0;
        into = thread->crop;
    }
    Resize resize = {.height = (int32_t)part[2],     .width = (int32_t)part[3],
                     .rows = (int32_t)rule->rows,    .columns = (int32_t)rule->columns,
                     .flip = box->flip != 0,         .upend = box->upend != 0};
    dlio_resize_rgb(from, pitch, &resize, thread->sums, into);
    if (recipe->values)
        spread(into, pixels, recipe->values, recipe->wide, job->images[slot]);
    return 1;
}

/* OpenCV takes the mean of areas there. */
static int is_of_areas(const CropRule *rule, const int64_t part[4]) {
    return part[2] >= 2 * rule->rows && part[3] >= 2 * rule->columns;
}

static int crop_png(const Job *job, const Sample *sample, const uint8_t *data, size_t size,
                    Thread *thread) {
    const CropRule *rule = &job->recipe->rule;
    PngShape shape;
    Box box;
    if (sample->kept == IN_PLACE) {
        /* Whoever leaves libpng because the file is cut off leaves its memory behind. */
        if (!reserve(&thread->packed, &thread->packed_size, size)) return UNREADABLE;
        memcpy(thread->packed, data, size);
        data = thread->packed;
    }
    if (!dlio_png_shape(data, size, &shape) || shape.height * shape.width > rule->most_pixels)
        return UNKNOWN;
    draw(rule, job->uniforms + job->draws * sample->slot, shape.height, shape.width, &box);
    if (is_of_areas(rule, box.part)) return UNKNOWN;
    size_t pitch = (size_t)shape.width * 3;
    if (!reserve(&thread->pixels, &thread->pixels_size, pitch * (size_t)shape.height + ROOM) ||
        !dlio_png_decode(data, size, &shape, thread->pixels))
        return UNKNOWN;
    const uint8_t *from = thread->pixels + (size_t)box.part[0] * pitch + (size_t)box.part[1] * 3;
    return put(job, sample->slot, from, pitch, box.part, &box, thread) ? MADE : UNKNOWN;
}

static int crop(const Job *job, const Sample *sample, const uint8_t *data, size_t size,
                Thread *thread) {
    const CropRule *rule = &job->recipe->rule;
    Header header;
    Box box;
    if (size && data[0] == 0x89) return crop_png(job, sample, data, size, thread);
    if (dlio_header(data, size, &header)) return UNKNOWN;
    if ((int64_t)header.height * header.width > rule->most_pixels) return UNKNOWN;
    draw(rule, job->uniforms + job->draws * sample->slot, header.height, header.width, &box);
    int shift = shift_of(rule, &box);
    int64_t part[4];
    shrink(&header, &box, shift, part);
    if (is_of_areas(rule, part)) return UNKNOWN;
    size_t memory = dlio_jpeg_memory(&header, size), mcu = (size_t)(header.mcu_width >> shift);
    size_t left = (size_t)part[1], right = (left + (size_t)part[3] - 1) / mcu * mcu + mcu;
    size_t pitch = (right - left / mcu * mcu) * 3;
    if (!memory || !reserve(&thread->memory, &thread->memory_size, memory) ||
        !reserve(&thread->pixels, &thread->pixels_size, pitch * (size_t)part[2] + ROOM))
        return UNKNOWN;
    if (dlio_jpeg_part(data, size, &header, box.part, part, shift, thread->memory,
                       thread->memory_size, thread->pixels, thread->pixels_size))
        return UNKNOWN;
    const uint8_t *from = thread->pixels + left % mcu * 3;
    return put(job, sample->slot, from, pitch, part, &box, thread) ? MADE : UNKNOWN;
}

/* Bytes that a read of its own costs as much as. */
enum { GAP = 4096 };

/* Copy runs of bytes; those of a file where there is one. Returns 0 if it cannot be read. */
static int copy_runs(const Piece *piece, int first, int file, int64_t offset, const uint8_t *data) {
    int64_t index[DIMENSIONS] = {0}, from = piece->from;
    uint8_t *to = (uint8_t *)(uintptr_t)piece->to;
    size_t run = (size_t)piece->count[DIMENSIONS - 1];
    for (;;) {
        if (data)
            memcpy(to, data + from, run);
        else if (!dlio_read_all(file, to, run, offset + from))
            return 0;
        int d = DIMENSIONS - 2;
        for (; d >= first; d--) {
            from += piece->from_step[d], to += piece->to_step[d];
            if (++index[d] < piece->count[d]) break;
            from -= piece->from_step[d] * piece->count[d], to -= piece->to_step[d] * piece->count[d];
            index[d] = 0;
        }
        if (d < first) return 1;
    }
}

/* Copy a part of a payload. Of a payload that lies as it is in a file, and is known to be intact, no
 * more is read than that part. */
static int cut(const Job *job, const Sample *sample, Thread *thread) {
    Piece piece = *dlio_piece(job, sample - job->samples);
    /* Dimensions that follow each other without a gap are one. */
    int first = DIMENSIONS - 1, last = DIMENSIONS - 1;
    for (int d = last - 1; d >= 0; d--) {
        if (piece.count[d] == 1) continue;
        if (first == last && piece.from_step[d] == piece.count[last] &&
            piece.to_step[d] == piece.count[last])
            piece.count[last] *= piece.count[d];
        else {
            first--;
            piece.count[first] = piece.count[d];
            piece.from_step[first] = piece.from_step[d], piece.to_step[first] = piece.to_step[d];
        }
    }
    int64_t runs = 1, span = piece.count[last];
    for (int d = first; d < last; d++)
        runs *= piece.count[d], span += (piece.count[d] - 1) * piece.from_step[d];
    if (piece.from < 0 || span < 0 || piece.from + span > sample->raw) return UNKNOWN;
    uint8_t *intact = job->intact ? job->intact + piece.payload : NULL;
    const Sample *whole = &thread->whole;
    int is_here = whole->raw > 0 && whole->descriptor == sample->descriptor &&
                  whole->block == sample->block && whole->offset == sample->offset &&
                  whole->raw == sample->raw && whole->digest == sample->digest;
    if (is_here) return copy_runs(&piece, first, -1, 0, thread->raw) ? MADE : UNREADABLE;
    int is_plain = sample->descriptor >= 0 && sample->stored == sample->raw;
    int is_known = !sample->checked || (intact && __atomic_load_n(intact, __ATOMIC_RELAXED));
    if (is_plain && is_known && (span < sample->raw || runs == 1)) {
        const uint8_t *here = dlio_in_place(sample, span, piece.from, span, NULL, thread);
        if (here) return copy_runs(&piece, first, -1, 0, here) ? MADE : UNREADABLE;
        int file = dlio_file_of(sample, thread);
        if (file < 0) return UNREADABLE;
        if (runs == 1 || span > runs * GAP)
            return copy_runs(&piece, first, file, sample->offset, NULL) ? MADE : UNREADABLE;
        thread->whole.raw = 0;
        if (!reserve(&thread->raw, &thread->raw_size, (size_t)span)) return UNREADABLE;
        if (!dlio_read_all(file, thread->raw, (size_t)span, sample->offset + piece.from))
            return UNREADABLE;
        piece.from = 0;
        return copy_runs(&piece, first, -1, 0, thread->raw) ? MADE : UNREADABLE;
    }
    thread->whole.raw = 0;
    if (!reserve(&thread->raw, &thread->raw_size, (size_t)sample->raw)) return UNREADABLE;
    const uint8_t *payload = NULL;
    int state = fetch(sample, span, thread, thread->raw, &payload);
    if (state != MADE) return state;
    if (intact && sample->checked) __atomic_store_n(intact, 1, __ATOMIC_RELAXED);
    if (payload == thread->raw && sample->checked) thread->whole = *sample;
    return copy_runs(&piece, first, -1, 0, payload) ? MADE : UNREADABLE;
}

/* Cut a crop out of pixels. */
static int crop_pixels(const Job *job, const Sample *sample, Thread *thread) {
    const CropRule *rule = &job->recipe->rule;
    int64_t height = sample->height, width = sample->width;
    if (job->recipe->crops != 1 || width < 1 || width > rule->most_pixels / height ||
        sample->raw != height * width * 3)
        return UNKNOWN;
    Box box;
    draw(rule, job->uniforms + job->draws * sample->slot, height, width, &box);
    if (is_of_areas(rule, box.part)) return UNKNOWN;
    if (!reserve(&thread->raw, &thread->raw_size, (size_t)sample->raw)) return UNREADABLE;
    const uint8_t *pixels = NULL;
    int state = fetch(sample, sample->stored, thread, thread->raw, &pixels);
    if (state != MADE) return state;
    size_t pitch = (size_t)width * 3;
    const uint8_t *from = pixels + (size_t)box.part[0] * pitch + (size_t)box.part[1] * 3;
    return put(job, sample->slot, from, pitch, box.part, &box, thread) ? MADE : UNREADABLE;
}

static int make(const Job *job, const Sample *sample, Thread *thread) {
    const Recipe *recipe = job->recipe;
    if (recipe->sleep_ns) {
        struct timespec time = {recipe->sleep_ns / 1000000000, recipe->sleep_ns % 1000000000};
        while (nanosleep(&time, &time) && errno == EINTR) {}
        return MADE;
    }
    if (sample->stored < 0 || sample->stored > sample->raw || sample->raw > MOST) return UNKNOWN;
    if (job->pieces) return cut(job, sample, thread);
    thread->whole.raw = 0;
    if (sample->height > 0) {
        int64_t began = dlio_now();
        int state = crop_pixels(job, sample, thread);
        thread->make_ns += dlio_now() - began;
        return state;
    }
    /* Of other sizes Python says what is wrong with them. */
    if (recipe->fixed ? sample->raw != recipe->least : sample->raw < recipe->least) return UNKNOWN;
    if (recipe->crops == WHOLE) {
        const uint8_t *payload = NULL;
        uint8_t *slot = job->images[sample->slot];
        int state = fetch(sample, sample->stored, thread, slot, &payload);
        if (state != MADE) return state;
        if (payload != slot) memcpy(slot, payload, (size_t)sample->raw);
        return scatter(job, sample, slot, INT64_MAX);
    }
    const Column *only = recipe->count == 1 && recipe->fixed ? recipe->column : NULL;
    uint8_t *into = NULL;
    if (only && !only->cast && only->bytes == sample->raw && sample->descriptor >= 0)
        into = slot_of(job, 0, sample->slot);
    int streams = recipe->direct && sample->stored == sample->raw && sample->descriptor >= 0;
    if (!into || streams) {
        if (!reserve(&thread->raw, &thread->raw_size, (size_t)sample->raw)) return UNREADABLE;
        if (!into) into = thread->raw;
    }
    if (streams) return stream(job, sample, thread);
    const uint8_t *payload = NULL;
    int state = fetch(sample, sample->stored, thread, into, &payload);
    if (state != MADE) return state;
    if (into == thread->raw || payload != into) state = scatter(job, sample, payload, INT64_MAX);
    if (state != MADE || !recipe->crops) return state;
    int64_t began = dlio_now();
    state = crop(job, sample, payload + recipe->least, (size_t)(sample->raw - recipe->least), thread);
    thread->make_ns += dlio_now() - began;
    return state;
}

int dlio_make(const Job *job, const Sample *sample, Thread *thread) {
    int state = sample->kept == IN_PLACE ? dlio_guarded(make, job, sample, thread)
                                         : make(job, sample, thread);
    if (state == UNREADABLE || state == DAMAGED) dlio_distrust(thread);
    return state;
}
