/* Damaged JPEGs for dlio's own decoder, in memory of exactly their size: made for sanitizers.
 *
 * `crops SEED COUNT FILE...` damages files at random.
 * With -DLIBFUZZER it is a target of libFuzzer.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dlio_jpeg_shape(const uint8_t *data, size_t size, int64_t shape[4]);
int dlio_jpeg_crop(const uint8_t *data, size_t size, const int64_t box[4], uint8_t *memory,
                   size_t memory_size, uint8_t *out, size_t out_size);

int dlio_jpeg_ends(const uint8_t *data, size_t size, size_t scan, size_t restarts);
void dlio_crops(int64_t *tasks, size_t count, uint8_t *memory, size_t memory_size, uint8_t *pixels,
                size_t pixels_size, uint8_t *sums, size_t sums_size);
int dlio_resize(const uint8_t *pixels, size_t pitch, const int64_t sizes[6], uint8_t *memory,
                size_t memory_size, uint8_t *out);

enum { ROOM = 128, MOST = 1 << 24 };

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

/* Resize an image of exactly its size. */
static void resize(size_t height, size_t width) {
    int64_t sizes[6] = {(int64_t)height, (int64_t)width,   1 + (int64_t)draw(60),
                        1 + (int64_t)draw(60), (int64_t)draw(2), (int64_t)draw(2)};
    size_t memory = (size_t)sizes[3] * 40 + 64;
    uint8_t *pixels = calloc(height * width, 3), *work = malloc(memory);
    uint8_t *out = malloc((size_t)(sizes[2] * sizes[3]) * 3);
    dlio_resize(pixels, width * 3, sizes, work, memory, out);
    free(pixels), free(work), free(out);
}

/* Decode a crop and resize it by one call, into memory of exactly its size. */
static void together(const uint8_t *data, size_t size, const int64_t box[4], uint8_t *work,
                     size_t memory, uint8_t *pixels, size_t count, int refused) {
    int64_t rows = 1 + (int64_t)draw(60), columns = 1 + (int64_t)draw(60);
    size_t sums_size = (size_t)columns * 40 + 64;
    uint8_t *out = malloc((size_t)(rows * columns) * 3), *sums = malloc(sums_size);
    int64_t task[13] = {(int64_t)(uintptr_t)data, (int64_t)size, 0, box[0], box[1], box[2], box[3],
                        rows, columns, (int64_t)draw(2), (int64_t)draw(2), (int64_t)(uintptr_t)out, 9};
    dlio_crops(task, 1, work, memory, pixels, count + ROOM, sums, sums_size);
    if (refused && task[12] != refused) {
        fprintf(stderr, "together: %d, not %d\n", (int)task[12], refused);
        abort();
    }
    free(out), free(sums);
}

/* Returns 0 if a crop was decoded. */
static int once(const uint8_t *data, size_t size) {
    int64_t shape[4], box[4];
    if (dlio_jpeg_shape(data, size, shape) || shape[0] * shape[1] > MOST) return 1;
    box[2] = 1 + (int64_t)draw((uint64_t)shape[0]), box[3] = 1 + (int64_t)draw((uint64_t)shape[1]);
    box[0] = (int64_t)draw((uint64_t)(shape[0] - box[2] + 1));
    box[1] = (int64_t)draw((uint64_t)(shape[1] - box[3] + 1));
    int64_t mcu = shape[2], first = box[1] / mcu * mcu;
    size_t columns = (size_t)((box[1] + box[3] + mcu - 1) / mcu * mcu - first);
    size_t count = columns * 3 * (size_t)box[2], memory = (size_t)shape[3];
    uint8_t *work = calloc(memory, 1), *out = malloc(count + ROOM);
    int refused = dlio_jpeg_crop(data, size, box, work, memory, out, count + ROOM);
    together(data, size, box, work, memory, out, count, refused);
    free(work), free(out);
    return refused;
}

#ifdef LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    state = size;
    once(data, size);
    return 0;
}
#else
int main(int count, char **names) {
    if (count < 4) return 2;
    state = strtoull(names[1], NULL, 10);
    long rounds = strtol(names[2], NULL, 10), decoded = 0;
    for (long k = 0; k < rounds; k++) {
        FILE *file = fopen(names[3 + k % (count - 3)], "rb");
        if (!file) return 2;
        static uint8_t whole[1 << 20];
        size_t size = fread(whole, 1, sizeof whole, file);
        fclose(file);
        size_t kept = draw(4) ? size : draw(size + 1);
        uint8_t *data = malloc(kept ? kept : 1);
        memcpy(data, whole, kept);
        size_t head = draw(2) && kept > 700 ? 700 : kept; /* half of them in the header */
        for (uint64_t n = draw(6); n && kept; n--) {
            uint8_t *at = data + draw(head);
            *at = draw(2) ? *at ^ (uint8_t)(1 << draw(8)) : draw(3) ? (uint8_t)draw(256) : 0xff;
        }
        decoded += !once(data, kept);
        dlio_jpeg_ends(data, kept, draw(kept + 2), draw(4));
        resize(1 + draw(70), 1 + draw(70));
        free(data);
    }
    printf("%ld of %ld decoded\n", decoded, rounds);
    return 0;
}
#endif
