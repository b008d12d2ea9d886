/* worker.c - see worker.h. */
#include "server/worker.h"

#include <signal.h>
#include <string.h>

#include "base/error.h"

static void *work(void *arg)
{
    srv_worker *w = arg;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->first && !w->ending) pthread_cond_wait(&w->change, &w->lock);
        srv_job *job = w->first;
        if (!job) break;
        w->first = job->next;
        if (!w->first) w->last = NULL;
        pthread_mutex_unlock(&w->lock);
        job->run(job);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Signals are for the thread that waits for them, not for this one. */
still_status srv_worker_start(srv_worker *w, still_error *err)
{
    sigset_t all, before;
    *w = (srv_worker){0};
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->change, NULL);
    w->made = true;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&w->thread, NULL, work, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return sti_fail(err, STILL_E_IO, "cannot start a thread: %s", strerror(failed));
    w->running = true;
    return STILL_OK;
}

bool srv_worker_add(srv_worker *w, srv_job *job)
{
    job->next = NULL;
    pthread_mutex_lock(&w->lock);
    bool taken = !w->ending;
    if (taken && w->last)
        w->last->next = job;
    else if (taken)
        w->first = job;
    if (taken) w->last = job;
    pthread_cond_signal(&w->change);
    pthread_mutex_unlock(&w->lock);
    return taken;
}

void srv_worker_stop(srv_worker *w)
{
    if (!w->running) return;
    pthread_mutex_lock(&w->lock);
    w->ending = true;
    pthread_cond_signal(&w->change);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    w->running = false;
}

void srv_worker_free(srv_worker *w)
{
    srv_worker_stop(w);
    if (!w->made) return;
    pthread_cond_destroy(&w->change);
    pthread_mutex_destroy(&w->lock);
    *w = (srv_worker){0};
}
