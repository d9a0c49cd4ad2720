/* Captured graphs: capture over several streams with its legality rules, and replay.
 *
 * The rules follow the error codes of acl/error_codes/rt_error_codes.h; what the driver does beyond them is not known
 * here. Where it is open, the stricter reading holds: an illegal call makes the capture invalid. */
#include "sim.h"

static int last_graph, graph_streams;
static __thread aclmdlRICaptureMode thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

int sim_count_graph_streams(void)
{
    return graph_streams;
}

/* ---- legality */
void sim_capture_invalidate(Graph *graph, const char *why)
{
    if (!graph->invalid) {
        graph->invalid = why;
        sim_log("invalid", why, -1, graph->id, 0);
    }
}

/* Calls that may wait for the device: refused as long as a capture of the kind that forbids them is under way, in the
 * thread that captures (thread_local) or in any (global). Allocations are refused in other threads only: torch_npu
 * fills the pool of a graph while it captures. */
aclError sim_unsafe(const char *what, bool allocates)
{
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return 0;
    for (Stream *stream = sim_streams; stream; stream = stream->next) {
        Graph *graph = stream->capture;
        if (!graph || graph->origin != stream || graph->mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) continue;
        bool own = pthread_equal(graph->thread, pthread_self());
        bool any = graph->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL && thread_mode == graph->mode;
        if (own ? allocates : !any) continue;
        if (own) sim_capture_invalidate(graph, what);
        return sim_fail(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "%s is not permitted while graph %d is captured", what,
                        graph->id);
    }
    return 0;
}

aclError sim_capture_check(Stream *stream, const char *what)
{
    if (!stream->capture) return 0;
    sim_capture_invalidate(stream->capture, what);
    return sim_fail(ACL_ERROR_RT_STREAM_CAPTURED, "%s (stream %d, graph %d)", what, stream->id, stream->capture->id);
}

EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode)
{
    aclmdlRICaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return 0;
}

/* ---- capture */
static aclError take_stream(Graph *graph, Stream *stream)
{
    int64_t limit = sim_setting("ASCEND_SIM_STREAM_LIMIT", 2048);
    if (sim_count_streams() + graph_streams >= limit || graph->num_streams == MAX_FORK)
        return sim_fail(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                        "stream resources are insufficient: %d streams and %d of graphs of %lld in use",
                        sim_count_streams(), graph_streams, (long long)limit);
    graph_streams++;
    stream->slot = graph->num_streams;
    graph->joined[graph->num_streams++] = stream;
    stream->capture = graph;
    memset(stream->clock, 0, sizeof stream->clock);
    return 0;
}

aclError sim_capture_task(Stream *stream, const Task *task)
{
    Graph *graph = stream->capture;
    if (graph->invalid)
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture is invalid since %s", graph->invalid);
    Task *node = malloc(sizeof *node);
    *node = *task;
    node->next = NULL;
    node->group = stream->group;
    node->stream_id = stream->id;
    if (node->executor) node->executor->references++;
    sim_collective_retain(node->collective);
    *graph->end = node;
    graph->end = &node->next;
    graph->num_tasks++;
    if (task->kind != TASK_WAIT) stream->clock[stream->slot] = ++graph->work[stream->slot];
    return 0;
}

void sim_capture_record(Stream *stream, Event *event)
{
    event->captured = stream->capture;
    event->recorded_on = stream->id;
    memcpy(event->clock, stream->clock, sizeof event->clock);
    event->clock[stream->slot] = stream->capture->work[stream->slot] + 1;  /* with the record itself, the next task */
}

aclError sim_capture_wait(Stream *stream, Event *event)
{
    Graph *graph = event->captured;
    if (!graph && !stream->capture) return 0;
    if (!graph && !event->issued) return 0;
    if (!graph) {
        sim_capture_invalidate(stream->capture, "a wait for work outside the capture");
        return sim_fail(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream waits for event %d, recorded outside",
                        event->id);
    }
    if (graph->finished)
        return sim_fail(ACL_ERROR_RT_EVENT_CAPTURED, "event %d was recorded in a capture that has ended", event->id);
    if (stream->capture && stream->capture != graph) {
        sim_capture_invalidate(stream->capture, "a wait for another capture");
        return sim_fail(ACL_ERROR_STREAM_CAPTURE_CONFLICT, "graph %d waits for graph %d", stream->capture->id,
                        graph->id);
    }
    if (!stream->capture) {
        if (stream->first)
            return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT, "stream %d joins with work left", stream->id);
        aclError code = take_stream(graph, stream);
        if (code) return code;
        sim_log("join", "", stream->id, graph->id, 0);
    }
    for (int i = 0; i < MAX_FORK; i++)
        if (event->clock[i] > stream->clock[i]) stream->clock[i] = event->clock[i];
    return 0;
}

static aclError begin(Stream *stream, aclmdlRICaptureMode mode)
{
    if (stream->capture) return sim_fail(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured", stream->id);
    if (stream->id == 0) return sim_fail(ACL_ERROR_RT_STREAM_NOT_SUPPORT_OPERA, "the default stream is not captured");
    Graph *graph = calloc(1, sizeof *graph);
    graph->id = ++last_graph;
    graph->end = &graph->first;
    graph->references = 1;
    graph->origin = stream;
    graph->thread = pthread_self();
    graph->mode = mode;
    aclError code = take_stream(graph, stream);
    if (code) {
        free(graph);
        return code;
    }
    sim_log("capture_begin", "", stream->id, graph->id, mode);
    return 0;
}

EXPORT aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode)
{
    ENTER("aclmdlRICaptureBegin");
    LEAVE(begin(sim_stream(handle), mode));
}

EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *graph)
{
    sim_lock();
    const Graph *capture = sim_stream(handle)->capture;
    if (status)
        *status = !capture           ? ACL_MODEL_RI_CAPTURE_STATUS_NONE
                  : capture->invalid ? ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED
                                     : ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE;
    if (graph) *graph = (aclmdlRI)capture;
    sim_unlock();
    return 0;
}

/* Where a stream has work that the origin never waited for, replays would end before that work. */
static int find_unjoined(const Graph *graph)
{
    for (int i = 0; i < graph->num_streams; i++)
        if (graph->joined[i] != graph->origin && graph->work[i] > graph->origin->clock[i]) return graph->joined[i]->id;
    return 0;
}

static aclError finish(Stream *stream, aclmdlRI *handle)
{
    Graph *graph = stream->capture;
    *handle = NULL;
    if (!graph) return sim_fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "stream %d is not captured", stream->id);
    if (graph->origin != stream)
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "the capture of graph %d began on stream %d", graph->id,
                        graph->origin->id);
    if (graph->mode != ACL_MODEL_RI_CAPTURE_MODE_RELAXED && !pthread_equal(graph->thread, pthread_self()))
        return sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD, "the capture began in another thread");
    int unjoined = find_unjoined(graph);
    bool open_group = stream->group != 0;
    for (int i = 0; i < graph->num_streams; i++) {
        graph->joined[i]->capture = NULL;
        graph->joined[i]->group = 0;
    }
    graph->finished = true;
    sim_log("capture_end", graph->invalid ? graph->invalid : "", stream->id, graph->id, graph->num_tasks);
    aclError code = 0;
    if (graph->invalid)
        code = sim_fail(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture is invalid since %s", graph->invalid);
    else if (unjoined)
        code = sim_fail(ACL_ERROR_RT_STREAM_UNJOINED, "stream %d did not join stream %d again", unjoined, stream->id);
    else if (open_group)
        code = sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group is still open");
    if (code)
        sim_graph_release(graph);
    else
        *handle = graph;
    return code;
}

EXPORT aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *graph)
{
    ENTER("aclmdlRICaptureEnd");
    LEAVE(finish(sim_stream(handle), graph));
}

/* ---- the life of a graph */
void sim_graph_release(Graph *graph)
{
    if (--graph->references) return;
    graph_streams -= graph->num_streams;
    while (graph->first) {
        Task *node = graph->first;
        graph->first = node->next;
        if (node->executor) sim_executor_release(node->executor);
        sim_collective_release(node->collective);
        free(node);
    }
    graph->destroyed = true;  /* the structure stays: events and group handles may still name it */
}

EXPORT aclError aclmdlRIDestroy(aclmdlRI handle)
{
    ENTER("aclmdlRIDestroy");
    Graph *graph = handle;
    if (graph->destroyed) LEAVE(sim_fail(ACL_ERROR_RT_PARAM_INVALID, "graph %d was destroyed before", graph->id));
    if (graph->in_flight) LEAVE(sim_fail(ACL_ERROR_RT_MODEL_RUNNING, "graph %d still runs", graph->id));
    sim_log("graph_destroy", "", -1, graph->id, 0);
    sim_graph_release(graph);
    LEAVE(0);
}

EXPORT aclError aclmdlRIGetId(aclmdlRI handle, uint32_t *id)
{
    *id = ((const Graph *)handle)->id;
    return 0;
}

static aclError replay(Graph *graph, Stream *stream)
{
    if (graph->destroyed) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "graph %d was destroyed", graph->id);
    aclError code = sim_capture_check(stream, "a replay on a captured stream");
    if (code) return code;
    graph->num_replays++;
    graph->in_flight++;
    sim_log("replay", "", stream->id, graph->id, graph->num_replays);
    /* In the order of capture, which respects every dependency inside. A kernel's arguments are read when it runs,
     * because an update may come between the replay and the kernel. */
    for (Task *node = graph->first; node; node = node->next) {
        if (node->kind == TASK_RECORD || node->kind == TASK_WAIT) continue;
        Task task = *node;
        task.executor = NULL;
        task.node = node;
        task.graph = graph;
        sim_push(stream, &task);
    }
    sim_push(stream, &(Task){.kind = TASK_GRAPH_END, .graph = graph});
    sim_settle();
    return sim_take_error(stream);
}

EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream)
{
    ENTER("aclmdlRIExecuteAsync");
    LEAVE(replay(handle, sim_stream(stream)));
}
