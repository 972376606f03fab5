/* Threads, and the queue of jobs that they take samples from. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    MOST_THREADS = 1024,
    STACK = 1 << 20,
    AHEAD = 4, /* samples, in the time of which memory answers */
    PAGE = 4096
};

#ifdef __linux__
#define CLOCK CLOCK_MONOTONIC
#else /* macOS cannot wait by another clock. */
#define CLOCK CLOCK_REALTIME
#endif

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work; /* there is a job, or the end */
    pthread_cond_t done; /* a job is done, or no thread is at a job that was cancelled */
    Job *first;          /* jobs with samples that no thread has taken, in order */
    int64_t ended;       /* jobs that were done so far */
    int64_t alive;       /* threads that have not ended */
    int stopping;
    Files *files;
    int64_t threads;
    pthread_t thread[MOST_THREADS];
} Pool;

static void deadline_in(int64_t ns, struct timespec *at) {
    clock_gettime(CLOCK, at);
    if (ns > 3600 * (int64_t)1000000000) ns = 3600 * (int64_t)1000000000;
    ns += at->tv_nsec;
    at->tv_sec += (time_t)(ns / 1000000000);
    at->tv_nsec = (long)(ns % 1000000000);
}

int64_t dlio_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void unlink_job(Pool *pool, Job *job) {
    for (Job **at = &pool->first; *at; at = &(*at)->after)
        if (*at == job) {
            *at = job->after;
            return;
        }
}

/* Have the processor's caches be filled with a sample that is read in place, and with where it goes. */
static void expect(const Job *job, int64_t k, const Thread *thread) {
    const Sample *sample = job->samples + k;
    const Recipe *recipe = job->recipe;
    if (job->pieces) {
        const Piece *piece = dlio_piece(job, k);
        int64_t bytes = piece->count[DIMENSIONS - 1];
        /* Dimensions that follow each other without a gap. */
        for (int d = DIMENSIONS - 2; d >= 0 && bytes < PAGE; d--) {
            if (piece->count[d] == 1) continue;
            if (piece->from_step[d] != bytes || piece->to_step[d] != bytes) break;
            bytes *= piece->count[d];
        }
        if (dlio_expect(sample, piece->from, bytes, thread))
            dlio_expect_write((const uint8_t *)(uintptr_t)piece->to, bytes);
    } else if (dlio_expect(sample, 0, sample->stored, thread))
        for (int64_t c = 0; c < recipe->count; c++) {
            int64_t bytes = recipe->column[c].stride;
            dlio_expect_write(job->columns[c] + sample->slot * bytes, bytes);
        }
}

/* Take samples of the first job, and make them without the lock. */
static void work_on(Pool *pool, Thread *thread) {
    Job *job = pool->first;
    int64_t from = job->next, to = from + job->chunk, refused = 0;
    if (to >= job->count) {
        to = job->count;
        pool->first = job->after;
    }
    job->next = to;
    pthread_mutex_unlock(&pool->lock);
    thread->make_ns = 0;
    thread->may_map = job->samples[from].kept == IN_PLACE && dlio_may_map();
    int64_t began = dlio_now();
    for (int64_t k = from; k < to; k++) {
        if (__atomic_load_n(&job->given_up, __ATOMIC_RELAXED)) {
            refused += to - k;
            break;
        }
        if (k + AHEAD < to) expect(job, k + AHEAD, thread);
        job->samples[k].state = dlio_make(job, job->samples + k, thread);
        refused += job->samples[k].state != MADE;
    }
    /* An open file keeps the memory of a block that is removed meanwhile. */
    dlio_thread_rest(thread);
    int64_t spent = dlio_now() - began;
    pthread_mutex_lock(&pool->lock);
    job->refused += refused;
    job->read_ns += spent - thread->make_ns;
    job->make_ns += thread->make_ns;
    job->left -= to - from;
    /* From here on a job without samples left may be gone. */
    if (!job->left) {
        pool->ended++;
        pthread_cond_broadcast(&pool->done);
    }
}

static void *run(void *argument) {
    Pool *pool = argument;
    Thread thread = {.files = pool->files, .file = -1, .folder = -1, .block = -1};
#ifdef __linux__
    /* Of this thread alone: it keeps its share of the processors, and never takes one at once from
     * the training loop when it wakes. It fails without harm. */
    struct sched_param none = {0};
    sched_setscheduler(0, SCHED_BATCH, &none);
    pthread_setname_np(pthread_self(), "dlio-native");
#endif
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stopping && !pool->first) pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stopping) break;
        work_on(pool, &thread);
    }
    pthread_mutex_unlock(&pool->lock);
    dlio_thread_end(&thread);
    pthread_mutex_lock(&pool->lock);
    pool->alive--;
    pthread_cond_broadcast(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Start threads, which read these files. NULL if not even one can be started. */
EXPORT Pool *dlio_pool_open(int64_t threads, Files *files) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->files = files;
    dlio_files_use(files);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
#ifdef __linux__
    pthread_condattr_setclock(&clock, CLOCK);
#endif
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, &clock);
    pthread_cond_init(&pool->done, &clock);
    pthread_condattr_destroy(&clock);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    /* Signals are for Python's main thread, but for that of a file that is cut off, see files.c. */
    sigset_t all, before;
    sigfillset(&all), sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    pthread_mutex_lock(&pool->lock);
    while (pool->threads < threads &&
           !pthread_create(pool->thread + pool->threads, &attributes, run, pool))
        pool->threads++;
    pool->alive = pool->threads;
    pthread_mutex_unlock(&pool->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!pool->threads) {
        dlio_files_close(files);
        free(pool);
        return NULL;
    }
    return pool;
}

/* Number of the pool's threads. */
EXPORT int64_t dlio_pool_threads(const Pool *pool) { return pool->threads; }

/* Order rows by their numbers, those of the same number as they are: by bytes, from the lowest.
 * `other` has room for as many. */
static void order_by(const int64_t *number, int64_t *rows, int64_t *other, int64_t count) {
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int64_t k = 0; k < count; k++) {
        int64_t each = number[rows[k]];
        low = each < low ? each : low, high = each > high ? each : high;
    }
    uint64_t most = (uint64_t)high - (uint64_t)low;
    for (int shift = 0; shift < 64 && most >> shift; shift += 8) {
        int64_t at[257] = {0};
#define BYTE(row) (((uint64_t)number[row] - (uint64_t)low) >> shift & 255)
        for (int64_t k = 0; k < count; k++) at[BYTE(rows[k]) + 1]++;
        for (int value = 0; value < 256; value++) at[value + 1] += at[value];
        for (int64_t k = 0; k < count; k++) other[at[BYTE(rows[k])]++] = rows[k];
#undef BYTE
        memcpy(rows, other, (size_t)count * sizeof *rows);
    }
}

static int64_t bytes_of(const Piece *piece) {
    int64_t bytes = 1;
    for (int d = 0; d < DIMENSIONS; d++) bytes *= piece->count[d];
    return bytes;
}

/* Number of slots that samples have; some have several. Without memory, that of samples. */
static int64_t slots_of(const Sample *samples, int64_t count) {
    int64_t highest = -1, slots = 0;
    for (int64_t k = 0; k < count; k++)
        highest = samples[k].slot > highest ? samples[k].slot : highest;
    uint8_t *seen = calloc((size_t)highest + 2, 1);
    if (!seen) return count;
    for (int64_t k = 0; k < count; k++) slots += !seen[samples[k].slot], seen[samples[k].slot] = 1;
    free(seen);
    return slots;
}

/* Make the samples of a job of the known rows of a table, whose columns, `count` numbers each, are
 * those of dlio/storage/sample_locations.py; if `sorted`, those of a file follow each other.
 *
 * order: gets the row of each sample.
 * pieces: of each row; NULL for whole payloads.
 * sums: bytes of all payloads or pieces; number of the first one's tier; 1 if others have another;
 *       slots.
 * Returns the number of samples. */
EXPORT int64_t dlio_pool_rows(const int64_t *table, int64_t count, const uint8_t *known,
                              const int64_t *slots, int64_t sorted, Sample *samples, int64_t *order,
                              const Piece *pieces, int64_t sums[4]) {
    enum { DESCRIPTOR, BLOCK, REGULAR, KEPT, OFFSET, STORED_, RAW, DIGEST, CHECKED, TIER };
    int64_t used = 0;
    for (int64_t row = 0; row < count; row++)
        if (known[row]) order[used++] = row;
    int64_t *other = sorted && used > 1 ? malloc((size_t)used * sizeof *other) : NULL;
    if (other) {
        order_by(table + BLOCK * count, order, other, used);
        order_by(table + DESCRIPTOR * count, order, other, used);
        free(other);
    }
    sums[0] = sums[2] = 0, sums[1] = used ? table[TIER * count + order[0]] : 0;
    for (int64_t k = 0; k < used; k++) {
        const int64_t *at = table + order[k];
        samples[k] = (Sample){.descriptor = at[DESCRIPTOR * count], .block = at[BLOCK * count],
                              .regular = at[REGULAR * count], .kept = at[KEPT * count],
                              .offset = at[OFFSET * count], .stored = at[STORED_ * count],
                              .raw = at[RAW * count], .digest = (uint64_t)at[DIGEST * count],
                              .checked = at[CHECKED * count], .slot = slots[order[k]]};
        sums[0] += pieces ? bytes_of(pieces + order[k]) : samples[k].raw;
        sums[2] |= at[TIER * count] != sums[1];
    }
    sums[3] = pieces ? slots_of(samples, used) : used;
    return used;
}

/* Begin a job: behind all others of the same order. */
EXPORT void dlio_pool_submit(Pool *pool, Job *job) {
    for (int64_t k = 0; k < job->count; k++) job->samples[k].state = WAITING;
    job->next = job->refused = job->read_ns = job->make_ns = job->given_up = 0;
    job->left = job->count;
    if (job->chunk < 1) job->chunk = 1;
    pthread_mutex_lock(&pool->lock);
    if (!job->count) {
        pool->ended++;
        pthread_cond_broadcast(&pool->done);
    } else {
        Job **at = &pool->first;
        while (*at && (*at)->order <= job->order) at = &(*at)->after;
        job->after = *at;
        *at = job;
        int64_t chunks = (job->count - 1) / job->chunk + 1;
        if (chunks >= pool->threads)
            pthread_cond_broadcast(&pool->work);
        else
            while (chunks--) pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
}

/* Wait until the job, if there is one, is done, or more jobs have ended than `*ended`, which is
 * brought up to date.
 * Returns 1 if the job is done, 0 otherwise. */
EXPORT int64_t dlio_pool_wait(Pool *pool, const Job *job, int64_t ns, int64_t *ended) {
    struct timespec at;
    deadline_in(ns, &at);
    pthread_mutex_lock(&pool->lock);
    while ((!job || job->left) && pool->ended == *ended)
        if (pthread_cond_timedwait(&pool->done, &pool->lock, &at) == ETIMEDOUT) break;
    *ended = pool->ended;
    int64_t is_done = job && !job->left;
    pthread_mutex_unlock(&pool->lock);
    return is_done;
}

/* Have whoever waits for a job look again. */
EXPORT void dlio_pool_wake(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->ended++;
    pthread_cond_broadcast(&pool->done);
    pthread_mutex_unlock(&pool->lock);
}

/* Samples of a job that are not done. */
EXPORT int64_t dlio_pool_left(Pool *pool, const Job *job) {
    pthread_mutex_lock(&pool->lock);
    int64_t left = job->left;
    pthread_mutex_unlock(&pool->lock);
    return left;
}

/* Give up those samples of a job that no thread is at, and wait for the others. Returns 1 when
 * no thread is at the job any more, 0 if one still is after so many nanoseconds. */
EXPORT int64_t dlio_pool_cancel(Pool *pool, Job *job, int64_t ns) {
    struct timespec at;
    deadline_in(ns, &at);
    pthread_mutex_lock(&pool->lock);
    if (job->left) {
        unlink_job(pool, job);
        job->left -= job->count - job->next;
        job->refused += job->count - job->next;
        job->next = job->count;
        __atomic_store_n(&job->given_up, 1, __ATOMIC_RELAXED);
    }
    while (job->left)
        if (pthread_cond_timedwait(&pool->done, &pool->lock, &at) == ETIMEDOUT) break;
    int64_t is_done = !job->left;
    pthread_mutex_unlock(&pool->lock);
    return is_done;
}

/* End the threads. Returns 0 and frees the pool when they have ended; otherwise the number of those
 * that have not after so many nanoseconds: the pool and its jobs then have to stay. */
EXPORT int64_t dlio_pool_close(Pool *pool, int64_t ns) {
    struct timespec at;
    deadline_in(ns, &at);
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    while (pool->alive)
        if (pthread_cond_timedwait(&pool->done, &pool->lock, &at) == ETIMEDOUT) break;
    int64_t alive = pool->alive;
    pthread_mutex_unlock(&pool->lock);
    if (alive) return alive;
    for (int64_t k = 0; k < pool->threads; k++) pthread_join(pool->thread[k], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    dlio_files_rest(pool->files);
    dlio_files_close(pool->files);
    free(pool);
    return 0;
}
