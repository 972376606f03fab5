/* PNGs of which this library makes crops. Internal to dlio/image/native; see README.md. */
#ifndef DLIO_PNG_H
#define DLIO_PNG_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t height, width;
    int colour; /* colour type, as in the file */
} PngShape;

/* Read the header. Returns 0 for what is no PNG, or one that is left to others. */
int dlio_png_shape(const uint8_t *data, size_t size, PngShape *shape);
/* Decode into height * width * 3 bytes, RGB. Returns 0 if it is damaged. */
int dlio_png_decode(const uint8_t *data, size_t size, const PngShape *shape, uint8_t *out);

#endif
