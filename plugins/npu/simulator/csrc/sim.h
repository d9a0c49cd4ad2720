/* What the parts of the simulated runtime share: devices, memory blocks, streams with their queues, graphs, executors.
 *
 * One lock guards everything (sim_lock). Public ACL functions take it; functions named sim_* below expect it held
 * unless their comment says otherwise. It is dropped while a kernel's handler runs, because handlers are Python and
 * take the interpreter's lock. */
#ifndef ASCEND_SIM_H
#define ASCEND_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "acl/acl.h"

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MAX_NAME 96
#define MAX_WORDS 64   /* integer and pointer arguments of one aclnn call */
#define MAX_DOUBLES 8  /* floating point registers of the calling convention */
#define MAX_FORK 64    /* streams that one capture can join */

/* First field of each aclnn object. */
enum {
    MAGIC_TENSOR = 0x5e4501,
    MAGIC_SCALAR,
    MAGIC_INTS,
    MAGIC_BOOLS,
    MAGIC_FLOATS,
    MAGIC_TENSORS,
    MAGIC_SCALARS,
    MAGIC_BYTES,
};
/* Their letters in specifications, in the same order. */
#define OBJECT_LETTERS "TSABRLZP"

/* ---- objects (objects.c): simulator.marshal mirrors these structures */
#define MAX_DIMS 8

typedef struct SimTensor {
    int32_t magic, type, num_dims, format;
    int64_t dims[MAX_DIMS], strides[MAX_DIMS];
    int64_t offset;
    int64_t num_stored, stored[MAX_DIMS];  /* dimensions as they lie in a private format */
    char *data;
    struct SimTensor *origin;  /* of a copy: the caller's, for outputs whose size the kernel finds */
    void *owned;               /* of a copy of the host's memory: what to free with it */
} SimTensor;

typedef struct {
    int32_t magic, type;
    char value[16];
} SimScalar;

/* A list of either kind of value; of objects it holds pointers. */
typedef struct {
    int32_t magic, unused;
    int64_t size;
    char values[];
} SimList;

void *aclCreateTensor(const int64_t *dims, uint64_t num_dims, int type, const int64_t *strides, int64_t offset,
                      int format, const int64_t *storage_dims, uint64_t num_storage_dims, void *data);
void *sim_create_list(int magic, const void *values, uint64_t size, size_t each);
void sim_destroy(void *object);
void *sim_copy(const void *object);
size_t sim_size_of(int type);   /* bytes of an element */

/* ---- kernels: the arguments of one prepared aclnn call, copied because the caller destroys its own after the launch */
typedef struct Executor {
    char name[MAX_NAME];
    char spec[MAX_WORDS + MAX_DOUBLES + 1];
    int64_t words[MAX_WORDS];
    double doubles[MAX_DOUBLES];
    int num_words, references;
    const char *group;  /* the word with letter G: the communicator by which it exchanges with other ranks, or NULL */
} Executor;

/* ---- tasks */
typedef enum {
    TASK_KERNEL,
    TASK_COPY,
    TASK_FILL,
    TASK_RECORD,
    TASK_WAIT,
    TASK_VALUE_WAIT,
    TASK_VALUE_WRITE,
    TASK_UPDATE,
    TASK_COLLECTIVE,
    TASK_HOST_CALL,
    TASK_GRAPH_END,
} TaskKind;

typedef struct Graph Graph;
typedef struct Event Event;
typedef struct Stream Stream;

typedef struct Task {
    TaskKind kind;
    Executor *executor;    /* KERNEL, UPDATE: owned */
    struct Task *node;     /* a replayed task reads its arguments from its graph's node when it runs; UPDATE: its target */
    Graph *graph;          /* set in replayed tasks and in updates: keeps the graph alive */
    void *destination;     /* COPY, FILL, VALUE_*; HOST_CALL: its argument */
    const void *source;    /* COPY */
    size_t size;           /* COPY, FILL: bytes */
    uint64_t value;        /* FILL, VALUE_* */
    uint32_t flag;         /* VALUE_WAIT: how to compare */
    Event *event;          /* RECORD, WAIT */
    uint64_t ticket;       /* RECORD, WAIT: which record of the event; what exchanges with ranks: its turn */
    struct Collective *collective;  /* COLLECTIVE */
    void (*call)(void *);  /* HOST_CALL */
    int group;             /* in a graph: the task group it belongs to, 0 for none */
    int stream_id;         /* in a graph: the stream it was captured from */
    struct Task *next;
} Task;

struct Event {
    int id;
    uint32_t flags;
    uint64_t issued, done;           /* counts of records put on a stream, and of those that ran */
    Graph *captured;                 /* the capture that last recorded it */
    int clock[MAX_FORK];             /* what the recording stream had seen of each stream of that capture */
    struct timespec time;
    int references;                  /* the handle, and tasks in queues */
    int recorded_on;
};

struct Graph {
    int id;
    Task *first, **end;
    int num_tasks, num_groups, num_streams, num_replays, in_flight;
    int references;                  /* the handle, the capture, and tasks in queues */
    Stream *origin;
    pthread_t thread;
    aclmdlRICaptureMode mode;
    Stream *joined[MAX_FORK];
    int work[MAX_FORK];              /* tasks recorded from each joined stream */
    const char *invalid;             /* why the capture can no longer become a graph */
    bool finished, destroyed;
};

typedef struct TaskGroup {
    Graph *graph;
    int id;
} TaskGroup;

struct Stream {
    int id, device;
    uint32_t flags;
    Task *first, **end;
    bool busy;                       /* one of its tasks is running, on the thread below */
    pthread_t runner;
    aclError error;                  /* of a task that failed, told at the next synchronization */
    char error_text[512];
    Graph *capture;
    int slot;                        /* its place in capture->joined */
    int clock[MAX_FORK];
    int group;
    TaskGroup *update;
    Task *update_next;
    struct Stream *next;
};

/* ---- lock, streams (streams.c) */
extern pthread_mutex_t sim_mutex;
extern Stream *sim_streams;
void sim_lock(void);
void sim_unlock(void);
Stream *sim_stream(aclrtStream handle);
int sim_count_streams(void);

/* ---- tasks, scheduler (tasks.c) */
extern pthread_cond_t sim_progress;                 /* a task has run */
bool sim_lazy(void);
aclError sim_issue(Stream *stream, Task task);
void sim_push(Stream *stream, const Task *task);
bool sim_step(Stream *only);
aclError sim_settle(void);
aclError sim_take_error(Stream *stream);
void sim_task_free(Task *task);

/* ---- waiting (waiting.c), Python's lock (interpreter.c) */
aclError sim_drain(Stream *stream);
/* Let go of Python's lock if this thread holds it; returns what takes it again, or NULL. */
void *sim_let_go(void);
void sim_take_again(void *state);

/* ---- graphs (graphs.c) */
aclError sim_capture_task(Stream *stream, const Task *task);
aclError sim_capture_wait(Stream *stream, Event *event);
void sim_capture_record(Stream *stream, Event *event);
aclError sim_capture_check(Stream *stream, const char *what);
aclError sim_unsafe(const char *what, bool allocates);
aclError sim_update_kernel(Stream *stream, Executor *executor);   /* task_groups.c */
int sim_count_graph_streams(void);
void sim_graph_release(Graph *graph);
void sim_capture_invalidate(Graph *graph, const char *why);
bool sim_capturing(int device);

/* ---- collectives of HCCL (hccl.c), and kernels that exchange with other ranks (communicating.c) */
void sim_collective_retain(struct Collective *collective);   /* these two take NULL */
void sim_collective_release(struct Collective *collective);
const char *sim_collective_name(const struct Collective *collective);
void sim_collective_pushed(Task *task);             /* gives it its turn, where it exchanges with other ranks */
bool sim_collective_blocked(const Task *task);
bool sim_waits_for_ranks(const Task *task);         /* NULL: no task */
bool sim_others_wait_for(const Stream *stream);
void sim_start_progress(void);                      /* waiting.c */
aclError sim_run_collective(const Task *task);
aclError sim_begin_exchange(const Task *task, const Executor *executor);
aclError sim_end_exchange(const Executor *executor, aclError code);

/* ---- kernels (aclnn.c) */
aclError sim_run_kernel(Executor *executor);   /* drops the lock while the handler runs */
void sim_executor_release(Executor *executor);
/* These three take the lock themselves. prepare_call: gives a copy of the arguments, NULL where it fails. */
aclError sim_prepare_call(const char *name, const int64_t *words, const double *doubles, Executor **made);
long sim_launch(const char *name, Executor *executor, aclrtStream handle);
int aclDestroyAclOpExecutor(Executor *executor);
/* Throws a C++ exception, which reaches Python as a RuntimeError; call it without the lock. */
void sim_throw(const char *text) __attribute__((noreturn));
aclError sim_own_host_data(Executor *executor);
bool sim_read(const void *address, void *into, size_t size);    /* false where the address is none */
void sim_guess(const int64_t *words, char *into, size_t room);  /* guess.c */

/* ---- devices and memory (device.c, memory.c) */
int sim_num_devices(void);
int sim_device(void);                /* the calling thread's device, -1 where none is set */
bool sim_is_device_memory(const void *address, size_t size);
bool sim_is_known_memory(const void *address, size_t size);
int64_t sim_setting(const char *name, int64_t otherwise);

/* ---- log, errors, injected failures (observe.c) */
void sim_log(const char *kind, const char *name, int stream, int graph, int64_t value);
aclError sim_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
void ascend_sim_set_message(const char *text);
aclError sim_injected(const char *function);   /* the failure asked for, 0 where none is */

/* Every public function begins with one of these: lock, then fail if a test asked for it or no device is there. */
#define ENTER(function)                                                                                               \
    sim_lock();                                                                                                       \
    aclError code_ = sim_num_devices() ? sim_injected(function)                                                       \
                                       : sim_fail(ACL_ERROR_RT_NO_DEVICE, "%s: no simulated device", function);       \
    if (code_) {                                                                                                      \
        sim_unlock();                                                                                                 \
        return code_;                                                                                                 \
    }
#define LEAVE(expression)                                                                                             \
    do {                                                                                                              \
        aclError result_ = (expression);                                                                              \
        sim_unlock();                                                                                                 \
        return result_;                                                                                               \
    } while (0)

#endif
