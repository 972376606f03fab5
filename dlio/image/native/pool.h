/* Batches made by threads that are not Python's. Internal to dlio/image/native; see README.md.
 *
 * Python describes a batch by arrays, and waits for it by one call. All structures are laid out for
 * ctypes and numpy: eight bytes a member. */
#ifndef DLIO_POOL_H
#define DLIO_POOL_H

#include <pthread.h>
#include <stdint.h>

/* What became of a sample. Whatever is not MADE, Python makes as it would without this library, with
 * all its errors; what was written for it is undefined. */
enum {
    WAITING = -1,  /* not begun, or given up with its job */
    MADE = 0,
    UNREADABLE = 1, /* its file cannot be opened or read, or ends too early */
    DAMAGED = 2,    /* its bytes are not those that were written */
    UNKNOWN = 3     /* coded in a way that this library leaves to others */
};
enum { STORED = 2, IN_MEMORY = -2, IN_PARTS = -3, IN_FOLDER = -4, IN_PLACE = 2, WHOLE = 2 };
/* Bytes that are read in place, at most: of more, the copy would be the smaller part, and all of a
 * tier would count as this process's memory. */
enum { SMALL = 1 << 14 };

/* A part of a payload, which follows the one before: PART of dlio/data/reader_contract.py. */
typedef struct {
    int64_t descriptor; /* of its file, IN_MEMORY, or IN_FOLDER */
    int64_t offset;     /* in the file; or its address, or that of its NamedFile */
    int64_t bytes;
} Place;

/* A whole file below a folder: NAMED_FILE of dlio/data/reader_contract.py. */
typedef struct {
    int64_t folder;     /* its descriptor */
    int64_t name, name_bytes; /* address of the path below it */
    int64_t changed_ns; /* time of change (ctime) of the file that is meant */
    int64_t follows;    /* 1 if the path may lead over links; otherwise a file behind one is not read */
} NamedFile;

/* Where a sample's payload lies, and for which slot of the batch it is. */
typedef struct {
    int64_t descriptor; /* of its file, or of the folder of its block; IN_MEMORY, IN_PARTS */
    int64_t block;      /* number of the block that is its file, in a folder; -1 otherwise */
    int64_t regular;    /* 1 if the file has to be a regular one */
    int64_t kept;       /* 1 if its file may stay open after use; IN_PLACE if it lies in memory, too */
    int64_t offset;     /* in the file; or the payload's address, or that of its first Place */
    int64_t stored, raw; /* bytes in the file, and of the payload: fewer are LZ4 data */
    uint64_t digest;    /* XXH3 of the payload, 64 bits */
    int64_t checked;    /* 1 if the digest is to be compared; STORED if it is that of `stored` */
    int64_t height, width; /* of pixels, RGB, in place of an encoded image; 0 otherwise */
    int64_t slot;
    int64_t state;      /* written here: see above */
} Sample;

/* A part of a sample's payload that goes into a batch, for patches of arrays: PIECE of
 * dlio/loader/planned_engine/patch_tables.py. The last dimension is that of single bytes. */
enum { DIMENSIONS = 6 };
typedef struct {
    int64_t from; /* first byte in the payload */
    int64_t to;   /* address of its first byte in the batch */
    int64_t count[DIMENSIONS];
    int64_t from_step[DIMENSIONS], to_step[DIMENSIONS]; /* bytes */
    int64_t payload; /* number of the payload among all, of a job that knows which are intact */
} Piece;

/* The arrays of one field of patches, one a file: `FieldTable` there. All have as many dimensions, fewer
 * than DIMENSIONS. */
typedef struct {
    int64_t dimensions, element; /* bytes of an element */
    int64_t by_row; /* 1 if a patch lies in one index of the first dimension */
    int64_t bytes;  /* of a patch, in the batch */
    int64_t axes;   /* along which patches begin somewhere */
    int64_t axis[DIMENSIONS]; /* by dimension: the axis that it is, -1 for a whole one */
    int64_t side[DIMENSIONS], to_step[DIMENSIONS]; /* of a patch: elements; bytes between two, in the batch */
    const int64_t *shapes, *chunks, *grids; /* elements, those of a chunk, chunks: for each file by dimension */
    const int64_t *firsts;                  /* number of each file's first chunk */
} Field;

/* A field of fixed size, which goes into an array of the batch. */
typedef struct {
    int64_t at, bytes; /* in the payload */
    int64_t cast;      /* 0 to copy, or see `cast_into` in make.c */
    int64_t stride;    /* bytes from a slot to the next */
} Column;

/* The rule of crops: Crop of dlio/image/crop.py has the words. */
typedef struct {
    int64_t rows, columns;
    int64_t train;
    int64_t resize; /* 0: 8/7 of the shorter side */
    int64_t most_pixels;
    double scale[2], log_ratio[2], ratio[2];
    double flip, upend;
} CropRule;

/* How payloads become samples, the same for all batches of a loader. */
typedef struct {
    int64_t count;
    const Column *column; /* in the order of `at` */
    int64_t least;        /* bytes of the fixed part */
    int64_t fixed;        /* 1 if nothing follows it */
    int64_t direct;       /* 1 to read large fields into the batch itself */
    int64_t crops;        /* 1 if an image follows the fixed part, of which a crop is made; WHOLE if
                           * all of the payload goes to its slot of `images`, too */
    CropRule rule;
    /* Numbers that crops have in place of bytes: of each channel 256; NULL for bytes. */
    const uint8_t *values;
    int64_t wide;         /* bytes of a number: 2, 4 or 8 */
    int64_t sleep_ns;     /* emulates the time of decoding; 0 but in benchmarks */
} Recipe;

/* A batch, or a part of it. It stays where it is until it is done or cancelled. */
typedef struct Job {
    int64_t order;  /* lower ones are made first */
    int64_t count, chunk; /* samples; samples that a thread takes at a time */
    Sample *samples;
    const Recipe *recipe;
    uint8_t *const *columns; /* array of each column */
    uint8_t *const *images;  /* of each slot: crop, RGB, in bytes or the recipe's numbers; or payload */
    const double *uniforms;  /* random numbers of crops, by slot */
    int64_t draws;           /* of each */
    const Piece *pieces;     /* in place of columns and images; or NULL */
    const int64_t *rows;     /* the piece of each sample; NULL if they are in the samples' order */
    uint8_t *intact;         /* by payload: 1 if it was compared with its digest in this pass */
    /* Written by the pool, under its lock. */
    int64_t next, left; /* first sample that no thread has taken; samples that are not done */
    int64_t refused;    /* samples that are not MADE */
    int64_t read_ns, make_ns;
    int64_t given_up;   /* 1 if its samples are not wanted any more */
    struct Job *after;
} Job;

/* Files of blocks that stay open while a pool reads, and mapped as long as the folders stay: each open and
 * close costs more than reading a small sample, and so does mapping a file for a few of them. */
typedef struct {
    pthread_mutex_t lock;
    int64_t folder, block;
    int file;  /* -1: none */
    int users; /* threads that read it; it stays as long as there are some */
    int stale; /* 1 if it is to be opened again: the block may have been replaced */
    const uint8_t *map; /* the whole file in memory, if it is read in place; else NULL */
    size_t size;
} File;

typedef struct {
    int64_t count;
    File *file; /* a block has one place, by its number */
    int64_t most_open, open; /* descriptors that may stay open, and that are */
    int64_t users;           /* pools, and Python: whoever lets go last frees them */
} Files;

/* Where a thread may find that a file was cut off, and the way back from there (a sigjmp_buf). */
typedef struct {
    const uint8_t *map;
    size_t size;
    void *back;
} Fault;

/* Memory of a thread, which grows to the largest sample. */
typedef struct {
    Files *files;
    uint8_t *packed, *raw, *memory, *pixels, *sums, *crop;
    size_t packed_size, raw_size, memory_size, pixels_size, sums_size, crop_size;
    int64_t make_ns; /* spent on crops, of the samples that it is at */
    Sample whole;    /* whose payload is in `raw`, if its `raw` is above 0 */
    /* The file that is open, of a run of samples, and its place among those that stay open. */
    int64_t folder, block;
    int file;
    File *place;
    int may_map;  /* 1 if files of memory may be read in place */
    int in_place; /* 1 if that one is */
    Fault fault;
} Thread;

static inline const Piece *dlio_piece(const Job *job, int64_t sample) {
    return job->pieces + (job->rows ? job->rows[sample] : sample);
}

/* Nanoseconds of a clock that only goes on. */
int64_t dlio_now(void);
/* Make one sample; return what becomes of it. */
int dlio_make(const Job *job, const Sample *sample, Thread *thread);
void dlio_thread_end(Thread *thread);
/* Let go of the file that is open. */
void dlio_thread_rest(Thread *thread);
/* True if the end of a file in memory would be noticed: while nobody has put another handler of the
 * signal in the place of ours. Takes a system call. */
int dlio_may_map(void);
/* The same as `dlio_make`, of a sample that may be read in place. If its file is cut off meanwhile it is
 * read by calls, as all that follow. */
int dlio_guarded(int (*make)(const Job *, const Sample *, Thread *), const Job *job,
                 const Sample *sample, Thread *thread);
/* The descriptor of a sample's file, which stays open until the thread needs another; -1 without. */
int dlio_file_of(const Sample *sample, Thread *thread);
/* Where a sample's stored bytes lie in memory, if no more than SMALL are `wanted`; NULL if they have to be
 * read. So many `bytes` from one on are looked at: where some of them are on the file's last page
 * `*is_last` gets 1, and a copy of them is to be checked; NULL if nothing is. Within `dlio_guarded`. */
const uint8_t *dlio_in_place(const Sample *sample, int64_t wanted, int64_t from, int64_t bytes,
                             int *is_last, Thread *thread);
/* Have the processor's cache be filled with bytes of a sample that is made soon. Returns 0 if it is not
 * read in place. */
int dlio_expect(const Sample *sample, int64_t from, int64_t bytes, const Thread *thread);
/* The same of bytes that are written soon. */
void dlio_expect_write(const uint8_t *to, int64_t bytes);
/* Have the file be opened anew at its next use. */
void dlio_distrust(Thread *thread);
/* Read a whole file of so many bytes. Returns 0 if it cannot be read, or is another one. */
int dlio_read_named(const NamedFile *named, uint8_t *into, size_t size);
/* Returns 0 if the file cannot be read, or ends before. */
int dlio_read_all(int file, uint8_t *into, size_t size, int64_t offset);
/* Look at files as `dlio_files_status`, by few system calls. Returns how many of them were looked at, from
 * the first on: the others are to be looked at by other means. */
int64_t dlio_ring_status(int folder, int flags, const uint8_t *names, const int64_t *ends,
                         int64_t count, int64_t *rows);
/* Have one more user of them. */
void dlio_files_use(Files *files);
/* Close what is open and that no thread reads; maps stay. */
void dlio_files_rest(Files *files);
/* One user less. */
void dlio_files_close(Files *files);

#endif
