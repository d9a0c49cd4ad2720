/* Streams: queues of tasks in order. */
#include "sim.h"

pthread_mutex_t sim_mutex = PTHREAD_MUTEX_INITIALIZER;
Stream *sim_streams;
static int last_stream;

void sim_lock(void)
{
    pthread_mutex_lock(&sim_mutex);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&sim_mutex);
}

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
