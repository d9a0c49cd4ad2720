/* Waiting for streams: of the program, and of other ranks. */
#include "sim.h"

#include <errno.h>

#define RANK_POLL_NS 50000

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
                return sim_step(other) || unblock(other, depth + 1);
    return !sim_waits_for_ranks(task) && sim_step(NULL);
}

static int wait_for_progress(const struct timespec *until)
{
    void *interpreter = sim_let_go();
    int result = until ? pthread_cond_timedwait(&sim_progress, &sim_mutex, until) : pthread_cond_wait(&sim_progress, &sim_mutex);
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
        sim_task_free(dropped);
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
        if (sim_step(stream) || !stream->first || unblock(stream, 0) || wait_for_others()) continue;
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
            bool due = sim_lazy() ? sim_others_wait_for(stream) : stream->first != NULL;
            moved = due && !stream->busy && (sim_step(stream) || (sim_lazy() && unblock(stream, 0)));
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
    sim_step(stream);  /* so that a loop around the query ends under the lazy schedule too */
    *status = stream->first || stream->busy ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    LEAVE(0);
}

EXPORT aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc call, void *argument)
{
    ENTER("aclrtLaunchHostFunc");
    LEAVE(sim_issue(sim_stream(handle), (Task){.kind = TASK_HOST_CALL, .call = call, .destination = argument}));
}
