/* The prototype's loop of issue 42, without its decoder: threads that are not Python's take the
   samples of batches from one counter, and sleep in place of decoding. Compiled by loader_cores. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef struct Batch {
    int64_t count, next, left, sleep_ns;
    struct Batch *after;
} Batch;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    Batch *first, *last;
    int stopping, threads;
    pthread_t *members;
} Pool;

static void *run(void *given)
{
    Pool *pool = given;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stopping && !pool->first)
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stopping)
            break;
        Batch *batch = pool->first;
        if (++batch->next == batch->count) {
            pool->first = batch->after;
            if (!pool->first)
                pool->last = NULL;
        }
        struct timespec sleep = {batch->sleep_ns / 1000000000, batch->sleep_ns % 1000000000};
        pthread_mutex_unlock(&pool->lock);
        nanosleep(&sleep, NULL);
        pthread_mutex_lock(&pool->lock);
        if (!--batch->left)
            pthread_cond_broadcast(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

Pool *pool_open(int threads)
{
    Pool *pool = calloc(1, sizeof *pool);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->members = calloc(threads, sizeof *pool->members);
    while (pool->threads < threads &&
           !pthread_create(&pool->members[pool->threads], NULL, run, pool))
        pool->threads++;
    return pool;
}

Batch *pool_submit(Pool *pool, int64_t count, int64_t sleep_ns)
{
    Batch *batch = calloc(1, sizeof *batch);
    *batch = (Batch){count, 0, count, sleep_ns, NULL};
    pthread_mutex_lock(&pool->lock);
    if (pool->last)
        pool->last->after = batch;
    else
        pool->first = batch;
    pool->last = batch;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    return batch;
}

void pool_wait(Pool *pool, Batch *batch)
{
    pthread_mutex_lock(&pool->lock);
    while (batch->left)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    free(batch);
}

/* All batches have been waited for. */
void pool_close(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    while (pool->threads)
        pthread_join(pool->members[--pool->threads], NULL);
    free(pool->members);
    free(pool);
}
