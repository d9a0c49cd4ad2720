/* Tasks of streams, and the scheduler.
 *
 * Tasks run on the calling thread: at once where ASCEND_SIM_SCHEDULE is "eager" (the default: an error appears at the op
 * that caused it), or where it is "lazy" only when something waits for them, and then no more of other streams than the
 * waiter needs. A program that forgets to order two streams gets the right numbers under one of the two and not under
 * the other. */
#include "sim.h"

pthread_cond_t sim_progress = PTHREAD_COND_INITIALIZER;

bool sim_lazy(void)
{
    const char *schedule = getenv("ASCEND_SIM_SCHEDULE");
    return schedule && !strcmp(schedule, "lazy");
}

static void event_release(Event *event)
{
    if (event && --event->references == 0) free(event);
}

void sim_task_free(Task *task)
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
    sim_task_free(task);
    stream->busy = false;
    pthread_cond_broadcast(&sim_progress);
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
    if (!sim_lazy())
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
