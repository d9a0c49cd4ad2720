/* Streams, events and the scheduler.
 *
 * A stream is a queue of tasks in order. Tasks run on the calling thread: at once where ASCEND_SIM_SCHEDULE is "eager"
 * (the default: an error appears at the op that caused it), or where it is "lazy" only when something waits for them,
 * and then no more of other streams than the waiter needs. A program that forgets to order two streams gets the right
 * numbers under one of the two and not under the other. */
#include "sim.h"

#include <errno.h>

pthread_mutex_t sim_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
Stream *sim_streams;
static int last_stream;
#define RANK_POLL_NS 50000

void sim_lock(void)
{
    pthread_mutex_lock(&sim_mutex);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&sim_mutex);
}

static bool lazy(void)
{
    const char *schedule = getenv("ASCEND_SIM_SCHEDULE");
    return schedule && !strcmp(schedule, "lazy");
}

/* ---- streams */
static void add_stream(Stream *stream)
{
    Stream **place = &sim_streams;
    while (*place) place = &(*place)->next;
    *place = stream;
    stream->end = &stream->first;
}

/* A null handle is the default stream of the calling thread's device. */
Stream *sim_stream(aclrtStream handle)
{
    static Stream *defaults[MAX_DEVICES];
    if (handle) return handle;
    int device = sim_device() < 0 ? 0 : sim_device();
    if (!defaults[device]) {
        defaults[device] = calloc(1, sizeof(Stream));
        defaults[device]->device = device;
        add_stream(defaults[device]);
    }
    return defaults[device];
}

int sim_count_streams(void)
{
    int count = 0;
    for (Stream *stream = sim_streams; stream; stream = stream->next) count += stream->id > 0;
    return count;
}

static aclError create_stream(aclrtStream *handle, uint32_t flags)
{
    int64_t limit = sim_setting("ASCEND_SIM_STREAM_LIMIT", 2048);
    if (sim_device() < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "stream: no device is set");
    if (sim_count_streams() + sim_count_graph_streams() >= limit)
        return sim_fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "stream resources are insufficient: %lld of %lld in use",
                        (long long)limit, (long long)limit);
    Stream *stream = calloc(1, sizeof *stream);
    stream->id = ++last_stream;
    stream->device = sim_device();
    stream->flags = flags;
    add_stream(stream);
    sim_log("stream", "create", stream->id, -1, 0);
    *handle = stream;
    return 0;
}

EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flags)
{
    (void)priority;
    ENTER("aclrtCreateStream");
    LEAVE(create_stream(handle, flags));
}

EXPORT aclError aclrtCreateStream(aclrtStream *handle)
{
    return aclrtCreateStreamWithConfig(handle, 0, 0);
}

static aclError destroy_stream(aclrtStream handle)
{
    Stream *stream = handle;
    if (!stream) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "the default stream cannot be destroyed");
    if (stream->capture) return sim_fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured", stream->id);
    aclError code = sim_drain(stream);
    Stream **place = &sim_streams;
    while (*place && *place != stream) place = &(*place)->next;
    if (*place) *place = stream->next;
    sim_log("stream", "destroy", stream->id, -1, 0);
    free(stream);
    return code;
}

EXPORT aclError aclrtDestroyStream(aclrtStream handle)
{
    ENTER("aclrtDestroyStream");
    LEAVE(destroy_stream(handle));
}

EXPORT aclError aclrtDestroyStreamForce(aclrtStream handle)
{
    ENTER("aclrtDestroyStream");
    LEAVE(destroy_stream(handle));
}

EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t *id)
{
    sim_lock();
    *id = sim_stream(handle)->id;
    sim_unlock();
    return 0;
}

/* ---- tasks */
static void event_release(Event *event)
{
    if (event && --event->references == 0) free(event);
}

static void task_free(Task *task)
{
    if (task->executor) sim_executor_release(task->executor);
    if (task->kind == TASK_RECORD || task->kind == TASK_WAIT) event_release(task->event);
    if (task->kind == TASK_GRAPH_END) task->graph->in_flight--;
    if (task->graph) sim_graph_release(task->graph);
    sim_collective_release(task->collective);
    free(task);
}

static bool blocked(const Task *task)
{
    if (task->kind == TASK_WAIT) return task->event->done < task->ticket;
    if (task->kind == TASK_COLLECTIVE || task->kind == TASK_KERNEL) return sim_collective_blocked(task);
    if (task->kind != TASK_VALUE_WAIT) return false;
    uint64_t seen;
    memcpy(&seen, task->destination, sizeof seen);
    switch (task->flag) {
        case ACL_STREAM_WAIT_VALUE_GEQ: return seen < task->value;
        case ACL_STREAM_WAIT_VALUE_AND: return !(seen & task->value);
        case ACL_STREAM_WAIT_VALUE_NOR: return !~(seen | task->value);
        default: return seen != task->value;
    }
}

static aclError run(Task *task)
{
    size_t needed = task->kind == TASK_COPY || task->kind == TASK_FILL ? task->size : sizeof task->value;
    bool writes = task->kind == TASK_COPY || task->kind == TASK_FILL || task->kind == TASK_VALUE_WRITE;
    if (writes && needed && !sim_is_known_memory(task->destination, needed))
        return sim_fail(ACL_ERROR_RT_DEVICE_MEM_ERROR, "a task writes %zu bytes to freed memory at %p", needed,
                        task->destination);
    switch (task->kind) {
        case TASK_KERNEL: {
            Executor *executor = task->node ? task->node->executor : task->executor;
            aclError code = sim_begin_exchange(task, executor);
            return sim_end_exchange(executor, code ? code : sim_run_kernel(executor));
        }
        case TASK_COLLECTIVE: return sim_run_collective(task);
        case TASK_COPY:
            if (task->size && !sim_is_known_memory(task->source, task->size))
                return sim_fail(ACL_ERROR_RT_DEVICE_MEM_ERROR, "a copy reads %zu bytes of freed memory at %p",
                                task->size, task->source);
            memmove(task->destination, task->source, task->size);
            return 0;
        case TASK_FILL: memset(task->destination, (int)task->value, task->size); return 0;
        case TASK_VALUE_WRITE: memcpy(task->destination, &task->value, sizeof task->value); return 0;
        case TASK_RECORD:
            if (task->event->done < task->ticket) task->event->done = task->ticket;
            clock_gettime(CLOCK_MONOTONIC, &task->event->time);
            return 0;
        case TASK_UPDATE: {
            Executor *before = task->node->executor;
            task->node->executor = task->executor;
            task->executor = before;
            return 0;
        }
        case TASK_HOST_CALL:
            sim_unlock();  /* the function may be Python and may call this runtime */
            task->call(task->destination);
            sim_lock();
            return 0;
        default: return 0;
    }
}

/* Run one task of the stream, if its first one can run; true where something was done. */
static bool step(Stream *stream)
{
    Task *task = stream->first;
    if (!task || stream->busy || blocked(task)) return false;
    stream->first = task->next;
    if (!stream->first) stream->end = &stream->first;
    stream->busy = true;
    stream->runner = pthread_self();
    aclError code = run(task);
    if (code && !stream->error) {
        stream->error = code;
        snprintf(stream->error_text, sizeof stream->error_text, "%s", aclGetRecentErrMsg());
    }
    task_free(task);
    stream->busy = false;
    pthread_cond_broadcast(&progress);
    return true;
}

bool sim_step(Stream *only)
{
    if (only) return step(only);
    for (Stream *stream = sim_streams; stream; stream = stream->next)
        if (step(stream)) return true;
    return false;
}

void sim_push(Stream *stream, const Task *task)
{
    Task *queued = malloc(sizeof *queued);
    *queued = *task;
    queued->next = NULL;
    if (queued->executor) queued->executor->references++;
    if (queued->event) queued->event->references++;
    if (queued->graph) queued->graph->references++;
    sim_collective_retain(queued->collective);
    sim_collective_pushed(queued);
    *stream->end = queued;
    stream->end = &queued->next;
}

aclError sim_take_error(Stream *stream)
{
    aclError code = stream->error;
    stream->error = 0;
    if (code) ascend_sim_set_message(stream->error_text);  /* another thread may have run the task */
    return code;
}

/* Run everything that can run, unless tasks are to wait for a synchronization. */
aclError sim_settle(void)
{
    if (!lazy())
        while (sim_step(NULL)) {}
    return 0;
}

aclError sim_issue(Stream *stream, Task task)
{
    if (stream->update)
        return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP, "a task group is updated by kernels alone");
    if (stream->capture) return sim_capture_task(stream, &task);
    sim_push(stream, &task);
    sim_settle();
    return sim_take_error(stream);
}

/* ---- waiting */
static bool someone_else_runs(void)
{
    for (Stream *stream = sim_streams; stream; stream = stream->next)
        if (stream->busy && !pthread_equal(stream->runner, pthread_self())) return true;
    return false;
}

/* Bring a blocked stream one step further: by the stream that records what it waits for, else by any. */
static bool unblock(Stream *stream, int depth)
{
    Task *task = stream->first;
    if (task && task->kind == TASK_WAIT && depth < MAX_FORK)
        for (Stream *other = sim_streams; other; other = other->next)
            if (other->id == task->event->recorded_on && other != stream)
                return step(other) || unblock(other, depth + 1);
    return !sim_waits_for_ranks(task) && sim_step(NULL);
}

static int wait_for_progress(const struct timespec *until)
{
    void *interpreter = sim_let_go();
    int result = until ? pthread_cond_timedwait(&progress, &sim_mutex, until) : pthread_cond_wait(&progress, &sim_mutex);
    if (interpreter) {
        sim_unlock();
        sim_take_again(interpreter);
        sim_lock();
    }
    return result;
}

static bool other_ranks_are_due(void)
{
    for (Stream *stream = sim_streams; stream; stream = stream->next)
        if (sim_waits_for_ranks(stream->first)) return true;
    return false;
}

/* Give other threads the time that the test allows to issue what a blocked stream waits for, and other ranks the time
 * that HCCL allows: a collective that takes longer fails, and is blocked no more. */
static bool wait_for_others(void)
{
    int64_t patience_ms = sim_setting("ASCEND_SIM_WAIT_MS", 0);
    if (other_ranks_are_due()) {
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec += RANK_POLL_NS;
        if (soon.tv_nsec >= 1000000000) soon.tv_sec++, soon.tv_nsec -= 1000000000;
        wait_for_progress(&soon);
        return true;
    }
    if (someone_else_runs()) return wait_for_progress(NULL) == 0;
    if (patience_ms <= 0) return false;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += patience_ms / 1000;
    until.tv_nsec += patience_ms % 1000 * 1000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    return wait_for_progress(&until) != ETIMEDOUT;
}

/* What a hang is on a device is an error here. The stream's queue is dropped, so that later work can go on. */
static aclError deadlock(Stream *stream)
{
    const Task *task = stream->first;
    bool value = task->kind == TASK_VALUE_WAIT;
    int graph = task->graph ? task->graph->id : -1;
    sim_log("deadlock", value ? "value" : "event", stream->id, graph, value ? (int64_t)task->value : task->event->id);
    while (stream->first) {
        Task *dropped = stream->first;
        stream->first = dropped->next;
        if (dropped->kind == TASK_RECORD && dropped->event->done < dropped->ticket)
            dropped->event->done = dropped->ticket;
        task_free(dropped);
    }
    stream->end = &stream->first;
    return sim_fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d waits for ever: %s%s", stream->id,
                    value ? "nobody writes the value that it waits for" : "nobody records the event that it waits for",
                    graph >= 0 && value ? " (a graph was replayed without the update of its task groups)" : "");
}

aclError sim_drain(Stream *stream)
{
    while (stream->first || stream->busy) {
        if (stream->busy && pthread_equal(stream->runner, pthread_self()))
            return sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "stream %d is waited for by its own task", stream->id);
        if (stream->busy) {
            wait_for_progress(NULL);
            continue;
        }
        if (step(stream) || !stream->first || unblock(stream, 0) || wait_for_others()) continue;
        return deadlock(stream);
    }
    return sim_take_error(stream);
}

/* Other ranks wait for this one's tasks, whatever its program does: a device runs them, here a thread does. Under the
 * lazy schedule it runs no more than the collectives that others have posted wait for. */
static void *progress_for_ranks(void *unused)
{
    (void)unused;
    for (;;) {
        bool moved = false;
        sim_lock();
        for (Stream *stream = sim_streams; stream && !moved; stream = stream->next) {
            bool due = lazy() ? sim_others_wait_for(stream) : stream->first != NULL;
            moved = due && !stream->busy && (step(stream) || (lazy() && unblock(stream, 0)));
        }
        sim_unlock();
        if (!moved) nanosleep(&(struct timespec){.tv_nsec = RANK_POLL_NS}, NULL);
    }
    return NULL;
}

void sim_start_progress(void)
{
    static bool started;
    pthread_t thread;
    if (!started && !pthread_create(&thread, NULL, progress_for_ranks, NULL)) {
        pthread_detach(thread);
        started = true;
    }
}

static aclError synchronize_stream(aclrtStream handle)
{
    Stream *stream = sim_stream(handle);
    aclError code = sim_capture_check(stream, "a synchronization of a captured stream");
    if (code) return code;
    sim_log("synchronize", "stream", stream->id, -1, 0);
    return sim_drain(stream);
}

EXPORT aclError aclrtSynchronizeStream(aclrtStream handle)
{
    ENTER("aclrtSynchronizeStream");
    LEAVE(synchronize_stream(handle));
}

EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms)
{
    (void)timeout_ms;
    ENTER("aclrtSynchronizeStream");
    LEAVE(synchronize_stream(handle));
}

static aclError synchronize_device(void)
{
    aclError code = sim_unsafe("aclrtSynchronizeDevice", false);
    if (code) return code;
    sim_log("synchronize", "device", -1, -1, sim_device());
    for (Stream *stream = sim_streams; stream; stream = stream->next) {
        if (stream->device != sim_device() || stream->capture) continue;
        aclError one = sim_drain(stream);
        if (one && !code) code = one;
    }
    return code;
}

EXPORT aclError aclrtSynchronizeDevice(void)
{
    ENTER("aclrtSynchronizeDevice");
    LEAVE(synchronize_device());
}

EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms)
{
    (void)timeout_ms;
    ENTER("aclrtSynchronizeDevice");
    LEAVE(synchronize_device());
}

EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status)
{
    ENTER("aclrtStreamQuery");
    Stream *stream = sim_stream(handle);
    aclError code = sim_capture_check(stream, "a query of a captured stream");
    if (code) LEAVE(code);
    step(stream);  /* so that a loop around the query ends under the lazy schedule too */
    *status = stream->first || stream->busy ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    LEAVE(0);
}

EXPORT aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc call, void *argument)
{
    ENTER("aclrtLaunchHostFunc");
    LEAVE(sim_issue(sim_stream(handle), (Task){.kind = TASK_HOST_CALL, .call = call, .destination = argument}));
}
