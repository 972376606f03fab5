/* Crops of many images in one call, so that the interpreter's lock is given up and taken once. */
#include "jpeg.h"

#define EXPORT __attribute__((visibility("default")))

/* A crop: of a JPEG, or of pixels that are decoded already. */
typedef struct {
    int64_t data, size; /* address and bytes of a JPEG; of the crop's first pixel, RGB, and 0 */
    int64_t pitch;      /* bytes from a row of pixels to the next; 0 for a JPEG */
    int64_t box[4];     /* top, left, height, width; of pixels the last two */
    int64_t rows, columns, flip, upend; /* of the result */
    int64_t out;        /* its address: RGB without gaps */
    int64_t refused;    /* 0, or why not */
} Task;

int dlio_jpeg_shape(const uint8_t *data, size_t size, int64_t shape[4]);
int dlio_jpeg_crop(const uint8_t *data, size_t size, const int64_t box[4], uint8_t *memory,
                   size_t memory_size, uint8_t *out, size_t out_size, int is_portable);
int dlio_resize(const uint8_t *pixels, size_t pitch, const int64_t sizes[6], uint8_t *memory,
                size_t memory_size, uint8_t *out);

static int make(const Task *task, uint8_t *memory, size_t memory_size, uint8_t *pixels,
                size_t pixels_size, uint8_t *sums, size_t sums_size) {
    const uint8_t *from = (const uint8_t *)(uintptr_t)task->data;
    size_t pitch = (size_t)task->pitch;
    if (!task->pitch) {
        int64_t shape[4];
        int refused = dlio_jpeg_shape(from, (size_t)task->size, shape);
        if (!refused)
            refused = dlio_jpeg_crop(from, (size_t)task->size, task->box, memory, memory_size,
                                     pixels, pixels_size, 0);
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
