/* Jobs for native threads, of sound and of damaged samples, given up at random, of files that are
 * cut off meanwhile: for sanitizers.
 *
 * `pool SEED ROUNDS FOLDER PICTURE...` writes its files into FOLDER. Prints samples made and refused.
 * PNGs are read by the libpng whose path is in LIBPNG, if it is set.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../dlio/image/native/pool.h"

typedef struct Pool Pool;
void dlio_png_use(const int64_t addresses[15]);
void dlio_pool_use(const int64_t addresses[7]);
void dlio_payloads(Sample *samples, int64_t count, uint8_t *memory);
Files *dlio_files_open(int64_t count, int64_t most_open);
void dlio_files_close(Files *files);
Pool *dlio_pool_open(int64_t threads, Files *files);
void dlio_pool_wake(Pool *pool);
void dlio_pool_submit(Pool *pool, Job *job);
int64_t dlio_pool_wait(Pool *pool, const Job *job, int64_t ns, int64_t *ended);
int64_t dlio_pool_left(Pool *pool, const Job *job);
int64_t dlio_pool_cancel(Pool *pool, Job *job, int64_t ns);
int64_t dlio_pool_close(Pool *pool, int64_t ns);
int64_t dlio_pieces(const Field *field, int64_t count, const int64_t *files, const int64_t *rows,
                    const int64_t *starts, const int64_t *slots, int64_t to, int64_t room,
                    int64_t *row, int64_t *chunk, Piece *piece, uint8_t *padded);

enum { COUNT = 96, SLOTS = 40, SIDE = 24, JOBS = 4, DRAWS = 24, FIXED = 8 + 24 + 8, KINDS = 6 };

static uint64_t state;

static uint64_t draw(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

/* Called once in so many digests, before the payload is read. */
static void (*cut_off)(void);
static uint64_t digests;

/* Stand-ins for xxhash and lz4: what they compute is tested elsewhere. */
typedef struct { uint64_t sum; } Hash;
static int update(void *hash, const void *data, size_t size) {
    for (size_t k = 0; k < size; k++)
        ((Hash *)hash)->sum = (((Hash *)hash)->sum ^ ((const uint8_t *)data)[k]) * 1099511628211u;
    return 0;
}
static int reset(void *hash) { return ((Hash *)hash)->sum = 7, 0; }
static void *create(void) { return malloc(sizeof(Hash)); }
static int release(void *hash) { return free(hash), 0; }
static uint64_t end(const void *hash) { return ((const Hash *)hash)->sum; }
static uint64_t digest(const void *data, size_t size) {
    Hash hash;
    if (cut_off && !(__atomic_add_fetch(&digests, 1, __ATOMIC_RELAXED) % 200)) cut_off();
    reset(&hash), update(&hash, data, size);
    return hash.sum;
}
/* Each byte stands for two. */
static int expand(const char *from, char *to, int size, int room) {
    if (2 * size > room) return -1;
    for (int k = 0; k < size; k++) to[2 * k] = to[2 * k + 1] = from[k];
    return 2 * size;
}

static void load_libpng(const char *path) {
    static const char *const names[15] = {
        "png_get_libpng_ver", "png_create_read_struct", "png_create_info_struct",
        "png_destroy_read_struct", "png_get_error_ptr", "png_set_read_fn", "png_get_io_ptr",
        "png_read_info", "png_set_palette_to_rgb", "png_set_gray_to_rgb", "png_set_strip_alpha",
        "png_read_update_info", "png_get_rowbytes", "png_read_row", "png_read_end"};
    void *library = dlopen(path, RTLD_NOW);
    int64_t addresses[15];
    for (int k = 0; k < 15; k++) {
        addresses[k] = library ? (int64_t)(intptr_t)dlsym(library, names[k]) : 0;
        if (!addresses[k]) exit(3);
    }
    dlio_png_use(addresses);
}

typedef struct { uint8_t *data; size_t size; } Bytes;

static Bytes whole(const char *path) {
    FILE *file = fopen(path, "rb");
    struct stat status;
    if (!file || fstat(fileno(file), &status)) exit(3);
    Bytes bytes = {malloc((size_t)status.st_size), (size_t)status.st_size};
    if (fread(bytes.data, 1, bytes.size, file) != bytes.size) exit(3);
    fclose(file);
    return bytes;
}

/* A set of samples: payloads one after another in a file, and the rows that describe them. */
enum { PARTS = 3 };
typedef struct {
    Sample rows[COUNT];
    Place parts[COUNT][PARTS];
    NamedFile named[COUNT];
    char names[COUNT][32];
    uint8_t *memory;
    size_t size;
    int64_t folder, number;
    int file; /* its own, for payloads in parts */
} Set;

static Set *sets;
static const char *place;

static void path_of(const Set *set, const char *folder, char path[4096]) {
    snprintf(path, 4096, "%s/%08lld.blk", folder, (long long)set->number);
}

static void write_file(const Set *set, const char *folder) {
    char path[4096];
    path_of(set, folder, path);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(set->memory, 1, set->size, file) != set->size || fclose(file)) exit(3);
}

/* Have the last part be a file of its own, seldom another one than is said. */
static void name_last(Set *set, int k, const uint8_t *data) {
    Place *last = set->parts[k] + PARTS - 1;
    char *name = set->names[k];
    int bytes = snprintf(name, sizeof set->names[k], "%lld-%d", (long long)set->number, k);
    int file = openat((int)set->folder, name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    struct stat status;
    if (file < 0 || write(file, data, (size_t)last->bytes) != last->bytes || fstat(file, &status) ||
        close(file))
        exit(3);
    int64_t changed_ns = status.st_ctim.tv_sec * (int64_t)1000000000 + status.st_ctim.tv_nsec;
    set->named[k] = (NamedFile){.folder = set->folder, .name = (int64_t)(uintptr_t)name,
                                .name_bytes = bytes - !draw(12), .changed_ns = changed_ns + !draw(12),
                                .follows = (int64_t)draw(2)};
    last->descriptor = IN_FOLDER, last->offset = (int64_t)(uintptr_t)(set->named + k);
    last->bytes += !draw(12);
}

/* Have a payload, from a byte of the file on, lie in parts: of the file, of memory, and the last one may
 * be a file. Some are of no bytes, which is refused. */
static void divide(Set *set, int k, size_t at, size_t raw) {
    size_t from = 0;
    for (int p = 0; p < PARTS; p++) {
        size_t bytes = p == PARTS - 1 ? raw - from : draw(raw - from + 1);
        int is_file = draw(2) != 0;
        uintptr_t memory = (uintptr_t)(set->memory + at + from);
        set->parts[k][p] = (Place){.descriptor = is_file ? set->file : IN_MEMORY,
                                   .offset = (int64_t)(is_file ? at + from : memory),
                                   .bytes = (int64_t)bytes};
        from += bytes;
    }
    size_t last = (size_t)set->parts[k][PARTS - 1].bytes;
    if (draw(2)) name_last(set, k, set->memory + at + raw - last);
    Sample *row = set->rows + k;
    row->descriptor = IN_PARTS, row->block = -1, row->offset = (int64_t)(uintptr_t)set->parts[k];
    row->raw = row->stored = (int64_t)raw;
}

static void write_set(Set *set, const char *folder, int64_t number, const Bytes *pictures,
                      size_t count, size_t fixed) {
    char path[4096];
    set->number = number;
    path_of(set, folder, path);
    set->file = open(path, O_RDWR | O_CREAT, 0600);
    if (set->file < 0) exit(3);
    size_t at = 0;
    set->memory = malloc(COUNT * (fixed + (1 << 16)));
    for (int k = 0; k < COUNT; k++) {
        const Bytes *picture = count ? pictures + draw(count) : NULL;
        size_t raw = fixed + (picture ? picture->size : 0);
        uint8_t *payload = set->memory + at;
        for (size_t j = 0; j < fixed; j++) payload[j] = (uint8_t)draw(256);
        if (picture) memcpy(payload + fixed, picture->data, picture->size);
        if (picture && draw(2)) payload[fixed + draw(picture->size)] ^= (uint8_t)(1 + draw(255));
        Sample *row = set->rows + k;
        *row = (Sample){.descriptor = set->folder, .block = number, .regular = (int64_t)draw(2),
                        .kept = (int64_t)draw(IN_PLACE + 1),
                        .offset = (int64_t)at, .stored = (int64_t)raw, .raw = (int64_t)raw,
                        .checked = (int64_t)draw(2), .slot = (int64_t)draw(SLOTS)};
        if (!draw(12)) row->stored = row->raw / 2;
        if (!draw(12)) row->raw += (int64_t)draw(3) - 1;
        row->digest = digest(payload, raw) + !draw(12);
        if (!draw(12)) row->block += 1;
        if (!draw(30)) row->offset += 1 << 30;
        if (!draw(4))
            row->descriptor = IN_MEMORY, row->block = -1, row->offset = (int64_t)(uintptr_t)payload,
            row->raw = (int64_t)raw, row->stored = (int64_t)raw;
        else if (!draw(6))
            divide(set, k, at, raw);
        at += raw;
    }
    set->size = at;
    write_file(set, folder);
}

/* Cut all files off: of what is read in place, the memory is gone. */
static void cut_files(void) {
    char path[4096];
    for (int k = 0; k < KINDS; k++) {
        path_of(sets + k, place, path);
        if (truncate(path, 0)) exit(3);
    }
}

/* A part of up to so many bytes, as an array of three dimensions; seldom one beyond the payload. */
static Piece part_of(int64_t raw, uint8_t *to) {
    int64_t rows = 1 + (int64_t)draw(5), columns = 1 + (int64_t)draw(6), bytes = 1 + (int64_t)draw(40);
    int64_t step = bytes + (int64_t)draw(3), row = columns * step + (int64_t)draw(50);
    int64_t span = (rows - 1) * row + (columns - 1) * step + bytes;
    int64_t room = raw - span + !draw(12);
    Piece piece = {.from = room > 0 ? (int64_t)draw((uint64_t)room + 1) : 0,
                   .to = (int64_t)(intptr_t)to};
    for (int d = 0; d < DIMENSIONS; d++) piece.count[d] = 1;
    piece.count[3] = rows, piece.from_step[3] = row, piece.to_step[3] = columns * bytes;
    piece.count[4] = columns, piece.from_step[4] = step, piece.to_step[4] = bytes;
    piece.count[5] = bytes, piece.from_step[5] = piece.to_step[5] = 1;
    return piece;
}

static int64_t furthest(const Piece *piece, const int64_t *step) {
    int64_t at = 0;
    for (int d = 0; d < DIMENSIONS; d++) at += (piece->count[d] - 1) * step[d];
    return at;
}

/* Find the pieces of patches of arrays of one size, which begin before them, too, and end behind them.
 * Returns 0 if a piece leaves its chunk or its slot, or if they are not all that a patch has. */
static int cut_patches(void) {
    enum { PATCHES = 8, FILES = 3 };
    int64_t n = 1 + (int64_t)draw(DIMENSIONS - 1), whole = 1, chunks_a_file = 1, files[PATCHES];
    int64_t shapes[FILES * DIMENSIONS], chunks[FILES * DIMENSIONS], grids[FILES * DIMENSIONS];
    int64_t firsts[FILES], rows[PATCHES], slots[PATCHES], starts[PATCHES * DIMENSIONS];
    Field field = {.dimensions = n, .element = 1 << draw(4), .by_row = n > 1 && draw(2), .axes = n,
                   .shapes = shapes, .chunks = chunks, .grids = grids, .firsts = firsts};
    for (int64_t d = 0; d < n; d++) {
        int64_t shape = 1 + (int64_t)draw(7), chunk = 1 + (int64_t)draw(7);
        int is_whole = (!d && field.by_row) || draw(3) == 0;
        field.axis[d] = is_whole ? -1 : d;
        field.side[d] = !d && field.by_row ? 1 : is_whole ? shape : 1 + (int64_t)draw(9);
        for (int64_t k = 0; k < FILES; k++) {
            shapes[k * n + d] = shape, chunks[k * n + d] = chunk;
            grids[k * n + d] = (shape - 1) / chunk + 1;
        }
        chunks_a_file *= grids[d];
    }
    for (int64_t d = n - 1; d >= 0; d--) {
        field.to_step[d] = field.element * whole;
        whole *= field.side[d];
    }
    field.bytes = whole * field.element;
    for (int64_t k = 0; k < FILES; k++) firsts[k] = k * chunks_a_file;
    int64_t held[PATCHES] = {0}, wanted[PATCHES];
    for (int64_t k = 0; k < PATCHES; k++) {
        files[k] = (int64_t)draw(FILES), slots[k] = (int64_t)draw(PATCHES);
        rows[k] = (int64_t)draw((uint64_t)shapes[0]), wanted[k] = field.element;
        for (int64_t d = 0; d < n; d++) {
            int64_t start = (int64_t)draw(9) - 2, low = start > 0 ? start : 0;
            int64_t end = start + field.side[d] < shapes[d] ? start + field.side[d] : shapes[d];
            starts[k * n + d] = start;
            if (field.axis[d] >= 0)
                wanted[k] *= end > low ? end - low : 0;
            else
                wanted[k] *= field.side[d];
        }
    }
    uint8_t padded[PATCHES];
    int64_t needed =
        dlio_pieces(&field, PATCHES, files, rows, starts, slots, 0, 0, NULL, NULL, NULL, padded);
    int64_t *row = malloc((size_t)needed * 8 + 1), *chunk = malloc((size_t)needed * 8 + 1);
    Piece *piece = malloc((size_t)needed * sizeof *piece + 1);
    int good = needed == dlio_pieces(&field, PATCHES, files, rows, starts, slots, 0, needed, row,
                                     chunk, piece, padded);
    for (int64_t k = 0; k < needed; k++) {
        int64_t most = field.element, bytes = 1;
        for (int64_t d = 0; d < n; d++) most *= chunks[d] < shapes[d] ? chunks[d] : shapes[d];
        for (int d = 0; d < DIMENSIONS; d++) good &= piece[k].count[d] > 0, bytes *= piece[k].count[d];
        held[row[k]] += bytes;
        good &= piece[k].from >= 0 && piece[k].from + furthest(piece + k, piece[k].from_step) < most;
        int64_t to = piece[k].to - slots[row[k]] * field.bytes;
        good &= to >= 0 && to + furthest(piece + k, piece[k].to_step) < field.bytes;
        good &= chunk[k] / chunks_a_file == files[row[k]];
    }
    for (int64_t k = 0; k < PATCHES; k++) {
        good &= held[k] == wanted[k];
        good &= padded[k] || held[k] == field.bytes;
    }
    free(row), free(chunk), free(piece);
    return good;
}

/* Read payloads one after another into memory that has room for them alone. Returns 0 if one that is read
 * has another digest than it says, or no zeros behind it. */
static int read_payloads(const Set *set) {
    Sample rows[SLOTS];
    int64_t count = (int64_t)draw(SLOTS + 1), room = 0;
    for (int64_t k = 0; k < count; k++) {
        rows[k] = set->rows[draw(COUNT)];
        rows[k].slot = room, room += (rows[k].raw + 7) / 8 * 8;
    }
    uint8_t *memory = malloc((size_t)room + !room);
    memset(memory, 255, (size_t)room);
    dlio_payloads(rows, count, memory);
    int good = 1;
    for (int64_t k = 0; k < count; k++) {
        const uint8_t *at = memory + rows[k].slot;
        if (rows[k].state != MADE) continue;
        good &= rows[k].digest == digest(at, (size_t)rows[k].raw);
        for (int64_t byte = rows[k].raw; byte % 8; byte++) good &= !at[byte];
    }
    free(memory);
    return good;
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    state = strtoull(argv[1], NULL, 10);
    int rounds = atoi(argv[2]);
    size_t count = (size_t)argc - 4;
    Bytes *pictures = malloc(count * sizeof *pictures);
    for (size_t k = 0; k < count; k++) pictures[k] = whole(argv[4 + k]);
    int64_t functions[7] = {(int64_t)(intptr_t)digest, (int64_t)(intptr_t)create,
                            (int64_t)(intptr_t)release, (int64_t)(intptr_t)reset,
                            (int64_t)(intptr_t)update, (int64_t)(intptr_t)end,
                            (int64_t)(intptr_t)expand};
    dlio_pool_use(functions);
    if (getenv("LIBPNG")) load_libpng(getenv("LIBPNG"));
    int folder = open(argv[3], O_RDONLY | O_DIRECTORY);
    enum { LONG = 9000, HEIGHT = 50, WIDTH = 60, PART = 5 * 6 * 40 };
    Column small[3] = {{0, 8, 0, 8}, {8, 24, 0, 24}, {32, 4, 3, 8}};
    Column large[2] = {{0, 8, 0, 8}, {8, LONG - 8, 0, LONG - 8}};
    Recipe recipes[KINDS] = {
        {.count = 3, .column = small, .least = FIXED, .fixed = 1},
        {.count = 2, .column = large, .least = LONG, .fixed = 1, .direct = 1},
        {.count = 1, .column = small, .least = FIXED, .crops = 1,
         .rule = {.rows = SIDE, .columns = SIDE, .train = 1, .most_pixels = 1 << 22,
                  .scale = {0.08, 1}, .log_ratio = {-0.28, 0.28}, .ratio = {0.75, 1.33},
                  .flip = 0.5}},
    };
    recipes[4] = recipes[2]; /* Of pixels. */
    recipes[5] = recipes[0];
    recipes[5].fixed = 0, recipes[5].crops = WHOLE;
    sets = calloc(KINDS, sizeof *sets), place = argv[3];
    for (int k = 0; k < KINDS; k++) sets[k].folder = folder;
    write_set(sets, argv[3], 1, NULL, 0, FIXED);
    write_set(sets + 1, argv[3], 3, NULL, 0, LONG);
    write_set(sets + 2, argv[3], 5, pictures, count, FIXED);
    write_set(sets + 3, argv[3], 7, NULL, 0, LONG);
    write_set(sets + 4, argv[3], 9, NULL, 0, LONG);
    write_set(sets + 5, argv[3], 11, pictures, count, FIXED);
    for (int k = 0; k < COUNT; k++) {
        Sample *row = sets[4].rows + k;
        row->height = HEIGHT + !draw(12), row->width = WIDTH;
        if (row->checked && draw(2) && row->descriptor == IN_MEMORY) row->checked = STORED;
    }
    uint64_t made = 0, refused = 0, given_up = 0;
    int64_t in_order[SLOTS];
    for (int64_t k = 0; k < SLOTS; k++) in_order[k] = k;
    Files *files = NULL;
    for (int round = 0; round < rounds; round++) {
        cut_off = NULL;
        if (!cut_patches()) return 7;
        if (!read_payloads(sets + draw(KINDS))) return 8;
        for (int k = 0; k < KINDS; k++) write_file(sets + k, place);
        cut_off = cut_files;
        /* Maps outlive pools, and what becomes of their files meanwhile. */
        if (!files || !draw(3)) {
            if (files) dlio_files_close(files);
            files = dlio_files_open((int64_t)draw(12), (int64_t)draw(3));
            if (!files) return 3;
        }
        Pool *pool = dlio_pool_open(1 + (int64_t)draw(4), files);
        if (!pool) return 3;
        /* The pool keeps them. */
        if (!draw(4)) dlio_files_close(files), files = NULL;
        Job jobs[JOBS];
        Sample *rows[JOBS];
        uint8_t *columns[JOBS][3], *images[JOBS][SLOTS], *parts[JOBS], intact[16] = {0};
        Piece *pieces[JOBS];
        double *uniforms = malloc(SLOTS * DRAWS * sizeof *uniforms);
        for (int k = 0; k < SLOTS * DRAWS; k++) uniforms[k] = (double)draw(1 << 20) / (1 << 20);
        int64_t ended = 0;
        for (int j = 0; j < JOBS; j++) {
            int kind = (int)draw(KINDS);
            const Recipe *recipe = recipes + kind;
            rows[j] = malloc(sizeof sets->rows);
            memcpy(rows[j], sets[kind].rows, sizeof sets->rows);
            /* Two threads never make one slot. */
            int64_t used = (int64_t)draw(SLOTS + 1);
            for (int64_t k = 0; k < used; k++) {
                rows[j][k] = sets[kind].rows[draw(COUNT)];
                rows[j][k].slot = k;
            }
            for (int c = 0; c < 3; c++)
                columns[j][c] = c < recipe->count ? malloc(SLOTS * (size_t)recipe->column[c].stride)
                                                  : NULL;
            for (int k = 0; k < SLOTS; k++) images[j][k] = NULL;
            for (int64_t k = 0; k < used; k++)
                images[j][rows[j][k].slot] =
                    malloc(kind == 5 ? (size_t)rows[j][k].raw : SIDE * SIDE * 3);
            parts[j] = malloc(SLOTS * PART), pieces[j] = malloc(SLOTS * sizeof *pieces[j]);
            for (int64_t k = 0; k < used; k++)
                pieces[j][k] = part_of(rows[j][k].raw, parts[j] + k * PART),
                pieces[j][k].payload = rows[j][k].block >= 0 ? rows[j][k].block : 15;
            jobs[j] = (Job){.order = (int64_t)draw(3), .count = used, .chunk = (int64_t)draw(9),
                            .samples = rows[j], .recipe = recipe, .columns = columns[j],
                            .images = images[j], .uniforms = uniforms, .draws = DRAWS,
                            .pieces = kind == 3 ? pieces[j] : NULL,
                            .rows = draw(2) ? in_order : NULL,
                            .intact = draw(2) ? intact : NULL};
            dlio_pool_submit(pool, jobs + j);
        }
        for (int j = 0; j < JOBS; j++) {
            if (draw(3))
                while (!dlio_pool_wait(pool, jobs + j, 1000000000, &ended)) {}
            else
                dlio_pool_cancel(pool, jobs + j, 1000000000000);
            if (dlio_pool_left(pool, jobs + j)) return 4;
            dlio_pool_wake(pool);
        }
        if (dlio_pool_close(pool, 1000000000000)) return 5;
        for (int j = 0; j < JOBS; j++) {
            int64_t bad = 0;
            for (int64_t k = 0; k < jobs[j].count; k++) {
                made += rows[j][k].state == MADE, bad += rows[j][k].state != MADE;
                refused += rows[j][k].state > MADE, given_up += rows[j][k].state == WAITING;
            }
            if (bad != jobs[j].refused) return 6;
            free(rows[j]), free(parts[j]), free(pieces[j]);
            for (int k = 0; k < SLOTS; k++) free(images[j][k]);
            for (int c = 0; c < 3; c++) free(columns[j][c]);
        }
        free(uniforms);
    }
    if (files) dlio_files_close(files);
    for (int k = 0; k < KINDS; k++) free(sets[k].memory), close(sets[k].file);
    for (size_t k = 0; k < count; k++) free(pictures[k].data);
    free(pictures), free(sets), close(folder);
    printf("%llu made, %llu refused, %llu given up\n", (unsigned long long)made,
           (unsigned long long)refused, (unsigned long long)given_up);
    return 0;
}
