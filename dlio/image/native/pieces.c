/* The parts of chunks that patches of arrays are made of. */
#include <string.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* What a patch has of an array, and the chunks that hold it, along each dimension. */
typedef struct {
    int64_t low[DIMENSIONS], high[DIMENSIONS]; /* indices in the array */
    int64_t before[DIMENSIONS];                /* indices of the patch that lie before the array */
    int64_t first[DIMENSIONS], last[DIMENSIONS]; /* chunks */
    int padded; /* 1 if the array does not fill the patch */
} Part;

/* Returns 0 if a patch has nothing of its array. */
static int part_of(const Field *field, const int64_t *shape, const int64_t *chunks, int64_t row,
                   const int64_t *starts, Part *part) {
    int is_there = 1;
    part->padded = 0;
    for (int64_t d = 0; d < field->dimensions; d++) {
        int64_t axis = field->axis[d], low = 0, high = shape[d], before = 0;
        if (!d && field->by_row) low = row, high = row + 1;
        if (axis >= 0) {
            low = most(starts[axis], 0), high = least(starts[axis] + field->side[d], shape[d]);
            before = most(-starts[axis], 0);
        }
        is_there &= low >= 0 && low < high && high <= shape[d];
        part->low[d] = low, part->high[d] = high, part->before[d] = before;
        part->padded |= high - low != field->side[d];
        part->first[d] = low / chunks[d], part->last[d] = (high - 1) / chunks[d];
    }
    return is_there;
}

static void cut_chunk(const Field *field, const int64_t *shape, const int64_t *chunks,
                      const Part *part, const int64_t *place, int64_t to, Piece *piece) {
    int64_t step = field->element;
    *piece = (Piece){.to = to};
    for (int k = 0; k < DIMENSIONS; k++) piece->count[k] = 1;
    int last = DIMENSIONS - 1, gap = last - (int)field->dimensions;
    piece->count[last] = field->element, piece->from_step[last] = piece->to_step[last] = 1;
    for (int64_t d = field->dimensions - 1; d >= 0; d--) {
        int64_t begin = place[d] * chunks[d], end = least(begin + chunks[d], shape[d]);
        int64_t inside = most(part->low[d], begin);
        piece->count[d + gap] = least(part->high[d], end) - inside;
        piece->from_step[d + gap] = step, piece->to_step[d + gap] = field->to_step[d];
        piece->from += (inside - begin) * step;
        piece->to += (inside - part->low[d] + part->before[d]) * field->to_step[d];
        step *= end - begin;
    }
}

/* Find the parts of chunks that make up patches; those of one follow each other, in the order of chunks.
 *
 * files, rows, slots: of each patch; rows matter if patches lie in one each.
 * starts: first index along each axis, `axes` numbers for each patch.
 * to: address of the batch's array.
 * room: parts that the four following have room for.
 * row, chunk, piece: get the number of the patch among these, that of the chunk, and the part.
 * padded: gets 1 for patches that their parts do not fill.
 * Returns the number of parts; if that is above `room`, no more than these are written. */
EXPORT int64_t dlio_pieces(const Field *field, int64_t count, const int64_t *files,
                           const int64_t *rows, const int64_t *starts, const int64_t *slots,
                           int64_t to, int64_t room, int64_t *row, int64_t *chunk, Piece *piece,
                           uint8_t *padded) {
    int64_t made = 0, n = field->dimensions;
    for (int64_t k = 0; k < count; k++) {
        const int64_t *shape = field->shapes + files[k] * n, *chunks = field->chunks + files[k] * n;
        const int64_t *grid = field->grids + files[k] * n;
        int64_t place[DIMENSIONS], at = to + slots[k] * field->bytes, d;
        Part part;
        int is_there = part_of(field, shape, chunks, rows[k], starts + k * field->axes, &part);
        padded[k] = part.padded != 0;
        if (!is_there) continue;
        memcpy(place, part.first, sizeof place);
        do {
            if (made < room) {
                int64_t number = 0;
                for (d = 0; d < n; d++) number = number * grid[d] + place[d];
                row[made] = k, chunk[made] = field->firsts[files[k]] + number;
                cut_chunk(field, shape, chunks, &part, place, at, piece + made);
                piece[made].payload = chunk[made];
            }
            made++;
            for (d = n - 1; d >= 0; d--) {
                if (++place[d] <= part.last[d]) break;
                place[d] = part.first[d];
            }
        } while (d >= 0);
    }
    return made;
}
