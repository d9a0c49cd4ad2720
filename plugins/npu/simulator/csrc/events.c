/* Events, and waits for and writes of values in device memory. */
#include "sim.h"

static int last_event;

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flags)
{
    ENTER("aclrtCreateEvent");
    Event *event = calloc(1, sizeof *event);
    event->id = ++last_event;
    event->flags = flags;
    event->references = 1;
    event->recorded_on = -1;
    *handle = event;
    LEAVE(0);
}

EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flags)
{
    return aclrtCreateEventExWithFlag(handle, flags);
}

EXPORT aclError aclrtCreateEvent(aclrtEvent *handle)
{
    return aclrtCreateEventExWithFlag(handle, 0);
}

EXPORT aclError aclrtDestroyEvent(aclrtEvent handle)
{
    Event *event = handle;
    sim_lock();
    if (event && --event->references == 0) free(event);
    sim_unlock();
    return 0;
}

EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream where)
{
    ENTER("aclrtRecordEvent");
    Event *event = handle;
    Stream *stream = sim_stream(where);
    sim_log("record", "", stream->id, stream->capture ? stream->capture->id : -1, event->id);
    if (stream->capture) {
        sim_capture_record(stream, event);
        LEAVE(sim_issue(stream, (Task){.kind = TASK_RECORD}));
    }
    event->captured = NULL;
    event->recorded_on = stream->id;
    LEAVE(sim_issue(stream, (Task){.kind = TASK_RECORD, .event = event, .ticket = ++event->issued}));
}

EXPORT aclError aclrtResetEvent(aclrtEvent handle, aclrtStream where)
{
    /* A wait names the record that it waits for, so nothing is left to reset. */
    (void)handle;
    (void)where;
    return 0;
}

EXPORT aclError aclrtStreamWaitEvent(aclrtStream where, aclrtEvent handle)
{
    ENTER("aclrtStreamWaitEvent");
    Event *event = handle;
    Stream *stream = sim_stream(where);
    aclError code = sim_capture_wait(stream, event);
    if (code) LEAVE(code);
    sim_log("wait", "", stream->id, stream->capture ? stream->capture->id : -1, event->id);
    if (stream->capture) LEAVE(sim_issue(stream, (Task){.kind = TASK_WAIT}));
    LEAVE(sim_issue(stream, (Task){.kind = TASK_WAIT, .event = event, .ticket = event->issued}));
}

static aclError outside_capture(const Event *event, const char *what)
{
    if (!event->captured) return 0;
    if (!event->captured->finished) sim_capture_invalidate(event->captured, what);
    return sim_fail(ACL_ERROR_RT_EVENT_CAPTURED, "%s: event %d was recorded in a capture", what, event->id);
}

EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle)
{
    ENTER("aclrtSynchronizeEvent");
    Event *event = handle;
    aclError code = outside_capture(event, "a synchronization with an event");
    if (!code) code = sim_unsafe("aclrtSynchronizeEvent", false);
    while (!code && event->done < event->issued) {
        Stream *stream = sim_streams;
        while (stream && stream->id != event->recorded_on) stream = stream->next;
        if (!stream || !sim_step(stream)) code = stream ? sim_drain(stream) : ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
    }
    LEAVE(code);
}

EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status)
{
    ENTER("aclrtQueryEventStatus");
    Event *event = handle;
    aclError code = outside_capture(event, "a query of an event");
    if (code) LEAVE(code);
    if (event->done < event->issued) sim_step(NULL);  /* so that a loop around the query ends */
    *status = event->done < event->issued ? ACL_EVENT_RECORDED_STATUS_NOT_READY : ACL_EVENT_RECORDED_STATUS_COMPLETE;
    LEAVE(0);
}

EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status)
{
    aclrtEventRecordedStatus recorded;
    aclError code = aclrtQueryEventStatus(handle, &recorded);
    if (!code)
        *status = recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE ? ACL_EVENT_WAIT_STATUS_COMPLETE
                                                                 : ACL_EVENT_WAIT_STATUS_NOT_READY;
    return code;
}

EXPORT aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent from, aclrtEvent to)
{
    ENTER("aclrtEventElapsedTime");
    const Event *first = from, *second = to;
    if (!first->done || !second->done)
        LEAVE(sim_fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the time of an event that was never recorded"));
    /* The host's time, so that differences are ordered; they say nothing about a device. */
    *milliseconds = (float)(second->time.tv_sec - first->time.tv_sec) * 1e3f +
                    (float)(second->time.tv_nsec - first->time.tv_nsec) / 1e6f;
    LEAVE(0);
}

/* ---- values: what torch_npu builds its external events of */
static aclError on_value(const char *what, void *address, aclrtStream where, Task task)
{
    Stream *stream = sim_stream(where);
    if (!sim_is_device_memory(address, sizeof(uint64_t)))
        return sim_fail(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "%s at %p, no device memory", what, address);
    task.destination = address;
    sim_log(what, "", stream->id, stream->capture ? stream->capture->id : -1, (int64_t)task.value);
    return sim_issue(stream, task);
}

EXPORT aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream where)
{
    ENTER("aclrtValueWait");
    LEAVE(on_value("value_wait", address, where, (Task){.kind = TASK_VALUE_WAIT, .value = value, .flag = flag}));
}

EXPORT aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream where)
{
    (void)flag;
    ENTER("aclrtValueWrite");
    LEAVE(on_value("value_write", address, where, (Task){.kind = TASK_VALUE_WRITE, .value = value}));
}
