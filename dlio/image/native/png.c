/* PNGs, by the library libpng that OpenCV brings: it has no header here, and may be missing. */
#include <setjmp.h>
#include <string.h>

#include "png.h"

#define EXPORT __attribute__((visibility("default")))

enum { GREY = 0, RGB = 2, PALETTE = 3, RGBA = 6 };

static struct {
    const char *(*version)(const void *);
    void *(*create)(const char *, void *, void (*)(void *, const char *),
                    void (*)(void *, const char *));
    void *(*create_info)(void *);
    void (*release)(void **, void **, void **);
    void *(*error_data)(const void *);
    void (*set_input)(void *, void *, void (*)(void *, uint8_t *, size_t));
    void *(*input)(const void *);
    void (*read_info)(void *, void *);
    void (*palette_to_rgb)(void *);
    void (*grey_to_rgb)(void *);
    void (*strip_alpha)(void *);
    void (*update_info)(void *, void *);
    size_t (*row_bytes)(const void *, const void *);
    void (*read_row)(void *, uint8_t *, uint8_t *);
    void (*read_end)(void *, void *);
} libpng;

/* Take addresses of png_get_libpng_ver, png_create_read_struct and the others above, in that order.
 * Called before the first PNG; without it every PNG is left to others. */
EXPORT void dlio_png_use(const int64_t addresses[15]) { memcpy(&libpng, addresses, sizeof libpng); }

typedef struct {
    const uint8_t *at, *end;
    jmp_buf failed;
} Input;

static void fail(void *png, const char *text) {
    Input *input = libpng.error_data(png);
    longjmp(input->failed, 1);
}

static void ignore(void *png, const char *text) {}

static void read_input(void *png, uint8_t *to, size_t count) {
    Input *input = libpng.input(png);
    if ((size_t)(input->end - input->at) < count) fail(png, "");
    memcpy(to, input->at, count);
    input->at += count;
}

static uint32_t big(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

int dlio_png_shape(const uint8_t *data, size_t size, PngShape *shape) {
    static const uint8_t first[16] = "\x89PNG\r\n\x1a\n\0\0\0\rIHDR";
    if (!libpng.create || size < 33 || memcmp(data, first, 16)) return 0;
    uint32_t width = big(data + 16), height = big(data + 20);
    int depth = data[24], colour = data[25], interlaced = data[28];
    if (!width || !height || width > 1 << 20 || height > 1 << 20 || interlaced) return 0;
    if (!((depth == 8 && (colour == GREY || colour == RGB || colour == RGBA)) || colour == PALETTE))
        return 0;
    /* What makes several pictures of one, or transparent pixels, is left to others. */
    for (size_t at = 8; at + 12 <= size;) {
        uint32_t length = big(data + at);
        const uint8_t *name = data + at + 4;
        if (length > size - at - 12) return 0;
        if (!memcmp(name, "acTL", 4) || !memcmp(name, "fcTL", 4) || !memcmp(name, "tRNS", 4))
            return 0;
        if (!memcmp(name, "IEND", 4)) {
            *shape = (PngShape){(int64_t)height, (int64_t)width, colour};
            return 1;
        }
        at += 12 + (size_t)length;
    }
    return 0;
}

int dlio_png_decode(const uint8_t *data, size_t size, const PngShape *shape, uint8_t *out) {
    Input input = {.at = data, .end = data + size};
    void *png = libpng.create(libpng.version(NULL), &input, fail, ignore);
    void *info = png ? libpng.create_info(png) : NULL;
    if (!info) {
        if (png) libpng.release(&png, NULL, NULL);
        return 0;
    }
    if (setjmp(input.failed)) {
        libpng.release(&png, &info, NULL);
        return 0;
    }
    libpng.set_input(png, &input, read_input);
    libpng.read_info(png, info);
    if (shape->colour == PALETTE) libpng.palette_to_rgb(png);
    if (shape->colour == GREY) libpng.grey_to_rgb(png);
    if (shape->colour == RGBA) libpng.strip_alpha(png);
    libpng.update_info(png, info);
    size_t pitch = (size_t)shape->width * 3;
    if (libpng.row_bytes(png, info) != pitch) fail(png, "");
    for (int64_t row = 0; row < shape->height; row++)
        libpng.read_row(png, out + (size_t)row * pitch, NULL);
    libpng.read_end(png, info);
    libpng.release(&png, &info, NULL);
    return 1;
}

/* Decode a whole PNG: RGB without gaps. `shape` gets its height and width.
 * Returns 1; 0 for one that is left to others, or if `out` has no room for it. */
EXPORT int dlio_png(const uint8_t *data, size_t size, int64_t shape[2], uint8_t *out, size_t room) {
    PngShape found;
    if (!dlio_png_shape(data, size, &found)) return 0;
    shape[0] = found.height, shape[1] = found.width;
    if ((uint64_t)found.height * (uint64_t)found.width * 3 > room) return 0;
    return dlio_png_decode(data, size, &found, out);
}
