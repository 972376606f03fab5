/* Attributes of many files by few system calls: io_uring's, where the kernel has it and lets this process
 * use it. The kernel looks at several files at a time, which counts where each is a request to a server. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif
#endif

#if defined(IORING_FEAT_SINGLE_MMAP) && defined(SYS_io_uring_setup) && defined(STATX_BASIC_STATS)

enum { DEPTH = 128 /* files that are looked at at a time */ };

typedef struct {
    int ring;
    uint8_t *queues; /* both: of requests, and of answers */
    size_t queues_size;
    struct io_uring_sqe *requests;
    uint32_t *request_tail, *request_numbers, request_mask;
    uint32_t *answer_head, *answer_tail, answer_mask;
    struct io_uring_cqe *answers;
} Ring;

static void close_ring(Ring *ring) {
    if (ring->requests) munmap(ring->requests, DEPTH * sizeof *ring->requests);
    if (ring->queues) munmap(ring->queues, ring->queues_size);
    close(ring->ring);
}

static void *map(const Ring *ring, size_t size, int64_t offset) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, ring->ring, offset);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Returns 0 where there is none. */
static int open_ring(Ring *ring) {
    struct io_uring_params about = {0};
    memset(ring, 0, sizeof *ring);
    ring->ring = (int)syscall(SYS_io_uring_setup, DEPTH, &about);
    if (ring->ring < 0) return 0;
    size_t answers = about.cq_off.cqes + about.cq_entries * sizeof(struct io_uring_cqe);
    size_t requests = about.sq_off.array + about.sq_entries * sizeof(uint32_t);
    ring->queues_size = answers > requests ? answers : requests;
    if (about.features & IORING_FEAT_SINGLE_MMAP && about.sq_entries == DEPTH) {
        ring->queues = map(ring, ring->queues_size, IORING_OFF_SQ_RING);
        ring->requests = map(ring, DEPTH * sizeof *ring->requests, IORING_OFF_SQES);
    }
    if (!ring->queues || !ring->requests) {
        close_ring(ring);
        return 0;
    }
    uint8_t *at = ring->queues;
    ring->request_tail = (uint32_t *)(at + about.sq_off.tail);
    ring->request_numbers = (uint32_t *)(at + about.sq_off.array);
    ring->request_mask = *(uint32_t *)(at + about.sq_off.ring_mask);
    ring->answer_head = (uint32_t *)(at + about.cq_off.head);
    ring->answer_tail = (uint32_t *)(at + about.cq_off.tail);
    ring->answer_mask = *(uint32_t *)(at + about.cq_off.ring_mask);
    ring->answers = (struct io_uring_cqe *)(at + about.cq_off.cqes);
    return 1;
}

static void ask(Ring *ring, int folder, int flags, const char *name, struct statx *into, uint64_t row) {
    uint32_t tail = *ring->request_tail, slot = tail & ring->request_mask;
    ring->requests[slot] = (struct io_uring_sqe){
        .opcode = IORING_OP_STATX, .fd = folder, .addr = (uint64_t)(uintptr_t)name,
        .len = STATX_BASIC_STATS, .off = (uint64_t)(uintptr_t)into, .statx_flags = (uint32_t)flags,
        .user_data = row};
    ring->request_numbers[slot] = slot;
    __atomic_store_n(ring->request_tail, tail + 1, __ATOMIC_RELEASE);
}

/* Wait for so many requests that were asked, and note the error of each, or 0. Returns 0 if the kernel
 * takes no more; what it has taken is waited for all the same, as it writes to our memory. */
static int await(Ring *ring, uint32_t asked, int32_t *errors) {
    uint32_t left = asked, taken = 0;
    int works = 1;
    while (left) {
        uint32_t submit = works ? asked - taken : 0;
        if (!works && left == asked - taken) return 0;
        /* All at once: each answer that wakes this thread costs as much as looking by oneself. */
        uint32_t wanted = works ? left : left - (asked - taken);
        int64_t count = syscall(SYS_io_uring_enter, ring->ring, submit, wanted,
                                IORING_ENTER_GETEVENTS, NULL, 0);
        if (count >= 0)
            taken += (uint32_t)count;
        else if (errno != EINTR && (left == asked - taken || (errno != EAGAIN && errno != EBUSY)))
            works = 0;
        uint32_t head = *ring->answer_head;
        for (; head != __atomic_load_n(ring->answer_tail, __ATOMIC_ACQUIRE); head++, left--) {
            const struct io_uring_cqe *answer = ring->answers + (head & ring->answer_mask);
            errors[answer->user_data] = -answer->res;
        }
        __atomic_store_n(ring->answer_head, head, __ATOMIC_RELEASE);
    }
    return works;
}

static int64_t ns_of(struct statx_timestamp time) { return time.tv_sec * 1000000000 + time.tv_nsec; }

EXPORT int64_t dlio_ring_works(void) {
    Ring ring;
    struct statx status;
    int32_t error = ENOSYS;
    if (!open_ring(&ring)) return 0;
    ask(&ring, AT_FDCWD, 0, "/", &status, 0);
    int works = await(&ring, 1, &error);
    close_ring(&ring);
    return works && !error;
}

int64_t dlio_ring_status(int folder, int flags, const uint8_t *names, const int64_t *ends,
                         int64_t count, int64_t *rows) {
    Ring ring;
    if (!open_ring(&ring)) return 0;
    struct statx *status = malloc(DEPTH * sizeof *status);
    /* Names that end with 0. */
    char *text = count ? malloc((size_t)(ends[count - 1] + count)) : NULL;
    int32_t errors[DEPTH];
    int64_t done = 0;
    for (int works = status && text; works && done < count;) {
        int64_t some = count - done < DEPTH ? count - done : DEPTH;
        char *name = text;
        for (int64_t k = done; k < done + some; k++) {
            int64_t begin = k ? ends[k - 1] : 0, bytes = ends[k] - begin;
            memcpy(name, names + begin, (size_t)bytes);
            name[bytes] = 0;
            ask(&ring, folder, flags, name, status + (k - done), (uint64_t)(k - done));
            name += bytes + 1;
        }
        works = await(&ring, (uint32_t)some, errors);
        for (int64_t k = 0; works && k < some; k++) {
            int64_t *row = rows + 4 * (done + k), bytes = ends[done + k] - (done + k ? ends[done + k - 1] : 0);
            const uint8_t *own = names + (ends[done + k] - bytes);
            memset(row, 0, 4 * sizeof *row);
            /* Of the operation, and not of the file: the kernel is older than it. */
            if (errors[k] == EINVAL || errors[k] == EOPNOTSUPP) works = 0;
            if (errors[k] || !bytes || memchr(own, 0, (size_t)bytes) || !S_ISREG(status[k].stx_mode))
                continue;
            row[0] = (int64_t)status[k].stx_size, row[1] = ns_of(status[k].stx_mtime);
            row[2] = ns_of(status[k].stx_ctime), row[3] = 1;
        }
        if (works) done += some;
    }
    free(status), free(text);
    close_ring(&ring);
    return done;
}

#else

EXPORT int64_t dlio_ring_works(void) { return 0; }

int64_t dlio_ring_status(int folder, int flags, const uint8_t *names, const int64_t *ends,
                         int64_t count, int64_t *rows) {
    return 0;
}

#endif
