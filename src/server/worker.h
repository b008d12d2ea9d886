/* worker.h - a thread that runs jobs one after the other, in order of arrival. */
#ifndef SERVER_WORKER_H
#define SERVER_WORKER_H

#include <pthread.h>

#include "still.h"

typedef struct srv_job {
    struct srv_job *next;
    void (*run)(struct srv_job *job); /* may free the job */
} srv_job;

typedef struct srv_worker {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    srv_job *first, *last;
    bool made, running, ending; /* lock and thread exist; no more jobs */
} srv_worker;

still_status srv_worker_start(srv_worker *w, still_error *err);
/* False: the worker has stopped and the job is still the caller's. */
bool srv_worker_add(srv_worker *w, srv_job *job);
/* Runs the remaining jobs, then ends the thread; new jobs are refused. */
void srv_worker_stop(srv_worker *w);
void srv_worker_free(srv_worker *w); /* stops it first; does nothing if zeroed */

#endif
