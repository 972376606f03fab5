/* Files of blocks: opened, kept open, and those of memory read in place. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))

enum {
    FLAGS = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW,
    FEW = 32,     /* files whose attributes are asked for one by one, at most */
    LINE = 64,    /* bytes of the processor's cache */
    FETCHED = 4096, /* bytes that are fetched ahead at a time, at most */
    POPULATED = 1 << 23, /* bytes of a file all of whose pages are mapped at once, at most */
    MOST_MAPS = 1 << 15  /* of all files together: Linux lets a process have 65,530 */
};

#ifndef MAP_POPULATE /* Linux alone has it. */
#define MAP_POPULATE 0
#endif

/* A read of a file in memory costs as much as some 10 kB of copying, so that small samples are read
 * where they lie. Reading them there kills by SIGBUS if the file is cut off meanwhile: the handler below
 * ends the sample instead, which is then made by reading it, as all that follow. Behind the new end, its
 * page has zeros and no signal. So a sample counts only if the last page is there afterwards, and of that
 * page a copy is compared with its checksum, or nothing is read in place. */

static _Thread_local const Fault *expected; /* where this thread may meet the end of a file */
static struct sigaction before;
static int is_ready;
static long page; /* bytes */
static int64_t maps; /* of all files together */

static void faulted(int number, siginfo_t *info, void *context) {
    const Fault *fault = expected;
    if (fault && (const uint8_t *)info->si_addr - fault->map < (int64_t)fault->size &&
        (const uint8_t *)info->si_addr >= fault->map) {
        /* Who returns by a jump keeps the handler's mask, and the next signal would kill. */
        sigset_t own;
        sigemptyset(&own), sigaddset(&own, number);
        pthread_sigmask(SIG_UNBLOCK, &own, NULL);
        siglongjmp(*(sigjmp_buf *)fault->back, 1);
    }
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
        before.sa_handler(number);
    else {
        sigaction(number, &before, NULL);
        raise(number); /* Comes when this returns. */
    }
}

static void install(void) {
#ifdef __linux__
    struct sigaction own = {.sa_sigaction = faulted, .sa_flags = SA_SIGINFO};
    sigemptyset(&own.sa_mask);
    page = sysconf(_SC_PAGESIZE);
    is_ready = page > 0 && !sigaction(SIGBUS, &own, &before);
#endif
}

int dlio_may_map(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct sigaction now;
    pthread_once(&once, install);
    return is_ready && !sigaction(SIGBUS, NULL, &now) && (now.sa_flags & SA_SIGINFO) &&
           now.sa_sigaction == faulted;
}

int dlio_guarded(int (*make)(const Job *, const Sample *, Thread *), const Job *job,
                 const Sample *sample, Thread *thread) {
    sigjmp_buf back;
    thread->fault = (Fault){.back = &back};
    /* Without the mask of signals, which takes a system call. */
    if (!sigsetjmp(back, 0)) {
        int made = make(job, sample, thread);
        if (expected) (void)*(const volatile uint8_t *)(thread->fault.map + thread->fault.size - 1);
        expected = NULL;
        return made;
    }
    expected = NULL;
    dlio_distrust(thread);
    thread->may_map = 0;
    return make(job, sample, thread);
}

/* Files of blocks, so many of them mapped at most, and so many open while a pool reads; NULL without
 * memory. */
EXPORT Files *dlio_files_open(int64_t count, int64_t most_open) {
    Files *files = calloc(1, sizeof *files);
    if (!files) return NULL;
    files->file = calloc((size_t)count + 1, sizeof *files->file);
    if (!files->file) {
        free(files);
        return NULL;
    }
    files->count = count, files->most_open = most_open, files->users = 1;
    for (int64_t k = 0; k < count; k++) {
        files->file[k].file = -1;
        pthread_mutex_init(&files->file[k].lock, NULL);
    }
    return files;
}

static void close_file(File *place, Files *files) {
    if (place->file < 0) return;
    close(place->file);
    place->file = -1;
    __atomic_fetch_sub(&files->open, 1, __ATOMIC_RELAXED);
}

static void close_kept(File *place, Files *files) {
    if (place->map) {
        munmap((void *)(uintptr_t)place->map, place->size);
        __atomic_fetch_sub(&maps, 1, __ATOMIC_RELAXED);
    }
    __atomic_store_n(&place->map, NULL, __ATOMIC_RELAXED);
    close_file(place, files);
}

void dlio_files_use(Files *files) { __atomic_fetch_add(&files->users, 1, __ATOMIC_RELAXED); }

EXPORT void dlio_files_rest(Files *files) {
    for (int64_t k = 0; k < files->count && __atomic_load_n(&files->open, __ATOMIC_RELAXED); k++) {
        pthread_mutex_lock(&files->file[k].lock);
        if (!files->file[k].users) close_file(files->file + k, files);
        pthread_mutex_unlock(&files->file[k].lock);
    }
}

EXPORT void dlio_files_close(Files *files) {
    if (__atomic_sub_fetch(&files->users, 1, __ATOMIC_ACQ_REL)) return;
    for (int64_t k = 0; k < files->count; k++) {
        close_kept(files->file + k, files);
        pthread_mutex_destroy(&files->file[k].lock);
    }
    free(files->file);
    free(files);
}

void dlio_thread_rest(Thread *thread) {
    if (thread->place) {
        pthread_mutex_lock(&thread->place->lock);
        thread->place->users--;
        pthread_mutex_unlock(&thread->place->lock);
    } else if (thread->file >= 0)
        close(thread->file);
    thread->place = NULL, thread->file = -1, thread->folder = thread->block = -1;
    thread->in_place = 0;
}

static int open_block(const Sample *sample) {
    char name[32];
    snprintf(name, sizeof name, "%08lld.blk", (long long)sample->block);
    int file;
    do file = openat((int)sample->descriptor, name, FLAGS);
    while (file < 0 && errno == EINTR);
    struct stat status;
    if (file >= 0 && sample->regular && (fstat(file, &status) || !S_ISREG(status.st_mode))) {
        close(file);
        return -1;
    }
    return file;
}

/* Map the file of a block. It needs no descriptor from then on. */
static void map_block(const Sample *sample, File *place) {
    int file = place->file >= 0 ? place->file : open_block(sample);
    struct stat status;
    if (file >= 0 && !fstat(file, &status) && S_ISREG(status.st_mode) && status.st_size) {
        /* At once: a fault for every few pages takes several times as long. */
        int flags = MAP_SHARED | (status.st_size <= POPULATED ? MAP_POPULATE : 0);
        void *map = MAP_FAILED;
        if (__atomic_add_fetch(&maps, 1, __ATOMIC_RELAXED) <= MOST_MAPS)
            map = mmap(NULL, (size_t)status.st_size, PROT_READ, flags, file, 0);
        if (map != MAP_FAILED) {
            place->size = (size_t)status.st_size;
            __atomic_store_n(&place->map, map, __ATOMIC_RELAXED);
        } else
            __atomic_fetch_sub(&maps, 1, __ATOMIC_RELAXED);
    }
    if (file >= 0 && file != place->file) close(file);
}

static void open_kept(const Sample *sample, File *place, Files *files) {
    if (__atomic_add_fetch(&files->open, 1, __ATOMIC_RELAXED) <= files->most_open)
        place->file = open_block(sample);
    if (place->file < 0) __atomic_fetch_sub(&files->open, 1, __ATOMIC_RELAXED);
}

static File *place_of(const Sample *sample, const Files *files) {
    return files->file + (uint64_t)sample->block % (uint64_t)files->count;
}

/* Have the thread hold the file of a block that stays open or mapped, or have it stay in place of one
 * that nobody reads. It holds none if the place is taken by another, or no more may stay. */
static void hold_kept(const Sample *sample, Thread *thread, int in_place) {
    File *place = place_of(sample, thread->files);
    pthread_mutex_lock(&place->lock);
    int is_here = (place->file >= 0 || place->map) && !place->stale &&
                  place->folder == sample->descriptor && place->block == sample->block;
    /* Mapping a file for one sample takes longer than reading it. */
    int stays = place->users || (in_place && place->map && !place->stale);
    if (!is_here && !stays) {
        close_kept(place, thread->files);
        place->folder = sample->descriptor, place->block = sample->block, place->stale = 0;
        is_here = 1;
    }
    if (is_here) {
        if (in_place && !place->map) map_block(sample, place);
        thread->in_place = in_place && place->map;
        if (!thread->in_place && place->file < 0) open_kept(sample, place, thread->files);
        if (thread->in_place || place->file >= 0)
            thread->place = place, thread->file = place->file, place->users++;
    }
    pthread_mutex_unlock(&place->lock);
}

static int is_at(const Sample *sample, const Thread *thread) {
    return thread->folder == sample->descriptor && thread->block == sample->block;
}

/* Have the thread hold a sample's file, to be read in place if that may be. */
static void hold(const Sample *sample, Thread *thread, int in_place) {
    dlio_thread_rest(thread);
    if (sample->kept && thread->files->count) hold_kept(sample, thread, in_place);
    if (!thread->place) thread->file = open_block(sample);
    thread->folder = sample->descriptor, thread->block = sample->block;
}

int dlio_file_of(const Sample *sample, Thread *thread) {
    if (sample->block < 0) return (int)sample->descriptor;
    if (!is_at(sample, thread) || thread->file < 0) hold(sample, thread, 0);
    return thread->file;
}

const uint8_t *dlio_in_place(const Sample *sample, int64_t wanted, int64_t from, int64_t bytes,
                             int *is_last, Thread *thread) {
    if (sample->block < 0 || sample->kept != IN_PLACE || wanted > SMALL || !thread->may_map)
        return NULL;
    if (!is_at(sample, thread) || !thread->in_place) hold(sample, thread, 1);
    const File *place = thread->place;
    if (!thread->in_place || sample->offset < 0 ||
        sample->offset > (int64_t)place->size - sample->stored)
        return NULL;
    if (sample->offset + from + bytes > (int64_t)((place->size - 1) & ~(size_t)(page - 1))) {
        if (!is_last) return NULL;
        *is_last = 1;
    }
    thread->fault.map = place->map, thread->fault.size = place->size;
    expected = &thread->fault;
    return place->map + sample->offset;
}

int dlio_expect(const Sample *sample, int64_t from, int64_t bytes, const Thread *thread) {
    if (sample->kept != IN_PLACE || bytes > SMALL || !thread->files->count) return 0;
    /* Without the lock: a wrong address does no harm here. */
    const uint8_t *map = __atomic_load_n(&place_of(sample, thread->files)->map, __ATOMIC_RELAXED);
    if (!map) return 0;
    uintptr_t at = (uintptr_t)map + (uintptr_t)(sample->offset + from);
    for (int64_t k = 0; k < bytes && k < FETCHED; k += LINE)
        __builtin_prefetch((const void *)(at + (uintptr_t)k), 0, 2);
    return 1;
}

void dlio_expect_write(const uint8_t *to, int64_t bytes) {
    for (int64_t k = 0; k < bytes && k < FETCHED; k += LINE) __builtin_prefetch(to + k, 1, 2);
}

void dlio_distrust(Thread *thread) {
    if (!thread->place) return;
    pthread_mutex_lock(&thread->place->lock);
    thread->place->stale = 1;
    pthread_mutex_unlock(&thread->place->lock);
    dlio_thread_rest(thread);
}

int dlio_read_all(int file, uint8_t *into, size_t size, int64_t offset) {
    while (size) {
        ssize_t count = pread(file, into, size, offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        into += count, size -= (size_t)count, offset += count;
    }
    return 1;
}

#ifdef __APPLE__
#define st_mtim st_mtimespec
#define st_ctim st_ctimespec
#endif

static int64_t ns(struct timespec time) { return time.tv_sec * (int64_t)1000000000 + time.tv_nsec; }

/* Have `text` be a name that ends with 0. 0 if it has one within, or is too long. */
static int copy_name(char text[PATH_MAX], const uint8_t *name, int64_t bytes) {
    if (bytes < 1 || bytes >= PATH_MAX || memchr(name, 0, (size_t)bytes)) return 0;
    memcpy(text, name, (size_t)bytes);
    text[bytes] = 0;
    return 1;
}

/* Look at files of a folder. Of each, `rows` gets the bytes, the times of the last change of the contents
 * and of all, and 1; zeros if it is no regular file, or a link that is not to be followed. */
EXPORT void dlio_files_status(int64_t folder, int64_t follows, const uint8_t *names, const int64_t *ends,
                              int64_t count, int64_t *rows) {
    char name[PATH_MAX];
    struct stat status;
    int flags = follows ? 0 : AT_SYMLINK_NOFOLLOW;
    int64_t done = count < FEW ? 0 : dlio_ring_status((int)folder, flags, names, ends, count, rows);
    rows += 4 * done;
    for (int64_t k = done, begin = k ? ends[k - 1] : 0; k < count; begin = ends[k++], rows += 4) {
        memset(rows, 0, 4 * sizeof *rows);
        if (!copy_name(name, names + begin, ends[k] - begin) ||
            fstatat((int)folder, name, &status, flags) || !S_ISREG(status.st_mode))
            continue;
        rows[0] = status.st_size, rows[1] = ns(status.st_mtim), rows[2] = ns(status.st_ctim), rows[3] = 1;
    }
}

/* Open a file below a folder, waiting for nobody, nor for whoever has a lease on it (EAGAIN). -1 if it
 * cannot be, or lies behind a link that is not to be followed. */
static int open_named(const NamedFile *named) {
    char name[PATH_MAX];
    if (!copy_name(name, (const uint8_t *)(uintptr_t)named->name, named->name_bytes)) return -1;
    int file = -1;
    if (named->follows) {
        do file = openat((int)named->folder, name, FLAGS & ~O_NOFOLLOW);
        while (file < 0 && errno == EINTR);
        return file;
    }
#ifdef SYS_openat2
    /* `struct open_how` of the kernel; its RESOLVE_NO_SYMLINKS and RESOLVE_BENEATH. */
    struct { uint64_t flags, mode, resolve; } how = {.flags = FLAGS, .resolve = 0x04 | 0x08};
    do file = (int)syscall(SYS_openat2, (int)named->folder, name, &how, sizeof how);
    while (file < 0 && errno == EINTR);
#endif
    return file;
}

int dlio_read_named(const NamedFile *named, uint8_t *into, size_t size) {
    int file = open_named(named);
    if (file < 0) return 0;
    /* Looked at after the read: who changes a file while it is read changes its time. */
    struct stat status;
    int is_read = dlio_read_all(file, into, size, 0) && !fstat(file, &status) &&
                  S_ISREG(status.st_mode) && (size_t)status.st_size == size &&
                  ns(status.st_ctim) == named->changed_ns;
    close(file);
    return is_read;
}

/* Read whole files of these sizes to offsets of the memory. `read` gets 1 for each that was. */
EXPORT void dlio_files_read(const NamedFile *files, const int64_t *sizes, const int64_t *offsets,
                            int64_t count, uint8_t *memory, uint8_t *read) {
    for (int64_t k = 0; k < count; k++)
        read[k] = sizes[k] > 0 && dlio_read_named(files + k, memory + offsets[k], (size_t)sizes[k]);
}
