/* HCCL's collectives: tasks of a stream that run once all ranks have posted their part, captured like kernels.
 *
 * A rank's n-th collective of a communicator meets the n-th of the others, in the order in which calls and replays were
 * put on streams. No call waits on the host. A stream whose next task is a collective that others have not posted is
 * blocked; who waits for such a stream looks again until they have. */
#include "sim_hccl.h"

static HcclResult issue(const char *name, Comm *comm, aclrtStream handle, struct Collective given)
{
    sim_lock();
    Stream *stream = sim_stream(handle);
    aclError code = sim_injected(name);
    size_t size = sim_hccl_size(given.posted.type);
    bool reduces = given.op != HCCL_REDUCE_RESERVED;
    if (!code && comm->destroyed) code = sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a destroyed communicator", name);
    if (!code && (!size || (reduces && !sim_hccl_reduces(given.posted.type, given.op))))
        code = sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s does not take type %d (operation %d)", name, given.posted.type,
                        given.op);
    if (!code && given.posted.bytes > sim_slot_bytes())
        code = sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s of %llu bytes; ASCEND_SIM_HCCL_MB is %zu", name,
                        (unsigned long long)given.posted.bytes, sim_slot_bytes() >> 20);
    if (!code) {
        struct Collective *made = malloc(sizeof *made);
        *made = given;
        made->comm = comm;
        made->references = 1;
        comm->references++;
        snprintf(made->posted.name, sizeof made->posted.name, "%s", name);
        made->posted.op = given.op;
        const Graph *graph = stream->capture;
        sim_log(graph ? "capture" : "launch", name, stream->id, graph ? graph->id : -1, stream->group);
        code = sim_issue(stream, (Task){.kind = TASK_COLLECTIVE, .collective = made});
        sim_collective_release(made);
    }
    sim_unlock();
    return code ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

void sim_collective_retain(struct Collective *collective)
{
    if (collective) collective->references++;
}

void sim_collective_release(struct Collective *collective)
{
    if (!collective || --collective->references) return;
    sim_comm_release(collective->comm);
    free(collective);
}

const char *sim_collective_name(const struct Collective *collective)
{
    return collective->posted.name;
}

#define BYTES(count, type) ((count) * sim_hccl_size(type))

EXPORT HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                                HcclComm comm, aclrtStream stream)
{
    return issue("HcclAllReduce", comm, stream,
                 (struct Collective){.posted = {.bytes = BYTES(count, type), .type = type},
                                     .op = op, .send = send, .receive = receive, .count = count});
}

EXPORT HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             uint32_t root, HcclComm handle, aclrtStream stream)
{
    const Comm *comm = handle;
    return issue("HcclReduce", handle, stream,
                 (struct Collective){.posted = {.bytes = BYTES(count, type), .type = type, .root = (int32_t)root},
                                     .op = op, .send = send, .receive = comm->rank == root ? receive : NULL,
                                     .count = count});
}

EXPORT HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                                    HcclComm comm, aclrtStream stream)
{
    uint64_t bytes = BYTES(count, type) * ((const Comm *)comm)->size;
    return issue("HcclReduceScatter", comm, stream,
                 (struct Collective){.posted = {.bytes = bytes, .type = type},
                                     .op = op, .send = send, .receive = receive, .count = count});
}

EXPORT HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm comm,
                                aclrtStream stream)
{
    return issue("HcclAllGather", comm, stream,
                 (struct Collective){.posted = {.bytes = BYTES(count, type), .type = type},
                                     .op = HCCL_REDUCE_RESERVED, .send = send, .receive = receive, .count = count});
}

EXPORT HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                                aclrtStream stream)
{
    bool sends = ((const Comm *)handle)->rank == root;
    return issue("HcclBroadcast", handle, stream,
                 (struct Collective){.posted = {.bytes = BYTES(count, type), .type = type, .root = (int32_t)root},
                                     .op = HCCL_REDUCE_RESERVED, .send = sends ? buffer : NULL,
                                     .receive = sends ? NULL : buffer, .count = count});
}

EXPORT HcclResult HcclBarrier(HcclComm comm, aclrtStream stream)
{
    return issue("HcclBarrier", comm, stream, (struct Collective){.op = HCCL_REDUCE_RESERVED});
}

/* torch_npu makes a communicator of two ranks for each pair that sends, so a pair's calls meet like collectives. */
static HcclResult point_to_point(const char *name, void *send, void *receive, uint64_t count, HcclDataType type,
                                 uint32_t peer, HcclComm handle, aclrtStream stream)
{
    const Comm *comm = handle;
    if (comm->size != 2 || peer != 1 - comm->rank) return HCCL_E_NOT_SUPPORT;
    return issue(name, handle, stream,
                 (struct Collective){.posted = {.bytes = BYTES(count, type), .type = type},
                                     .op = HCCL_REDUCE_RESERVED, .send = send, .receive = receive, .count = count});
}

EXPORT HcclResult HcclSend(void *buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm,
                           aclrtStream stream)
{
    return point_to_point("HcclSend", buffer, NULL, count, type, peer, comm, stream);
}

EXPORT HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm,
                           aclrtStream stream)
{
    return point_to_point("HcclRecv", NULL, buffer, count, type, peer, comm, stream);
}

/* ---- what the scheduler asks (tasks.c, waiting.c) */
static Comm *comm_of(const Task *task)
{
    if (task->kind == TASK_COLLECTIVE) return task->collective->comm;
    const Executor *executor = task->node ? task->node->executor : task->executor;
    return task->kind == TASK_KERNEL && executor->group ? sim_comm_named(executor->group) : NULL;
}

void sim_collective_pushed(Task *task)
{
    Comm *comm = comm_of(task);
    if (comm) task->ticket = ++comm->issued;
}

/* Posts what this rank sends as soon as it can. */
bool sim_collective_blocked(const Task *task)
{
    Comm *comm = comm_of(task);
    if (!comm || comm->failed) return false;
    if (comm->done + 1 < task->ticket) return true;
    if (task->kind == TASK_KERNEL) return false;
    if (comm->announced < task->ticket) {
        const struct Collective *given = task->collective;
        size_t size = given->send ? given->posted.bytes : 0;
        if (size && !sim_is_device_memory(given->send, size)) {
            sim_comm_fail(comm, "%s reads %p, which is no device memory or was freed", given->posted.name, given->send);
            return false;
        }
        sim_announce(comm, task->ticket, &given->posted, given->send, size);
    }
    return !sim_all_posted(comm, task->ticket);
}

bool sim_waits_for_ranks(const Task *task)
{
    const Comm *comm = task ? comm_of(task) : NULL;
    return comm && task->kind == TASK_COLLECTIVE && comm->announced == task->ticket;
}

/* Whether a task of the stream exchanges with ranks that have posted their part of it. */
bool sim_others_wait_for(const Stream *stream)
{
    for (const Task *task = stream->first; task; task = task->next) {
        Comm *comm = comm_of(task);
        for (uint32_t rank = 0; comm && rank < comm->size; rank++)
            if (rank != comm->rank && atomic_load(&sim_rank_state(comm, rank)->posted) >= task->ticket) return true;
    }
    return false;
}

/* The rank whose tensor this one receives as it is. */
static uint32_t sender_to(const Comm *comm, const struct Collective *given)
{
    return !strcmp(given->posted.name, "HcclRecv") ? 1 - comm->rank : (uint32_t)given->posted.root;
}

/* The bytes that this rank receives go to `receive`, which no other rank reads. */
static aclError receive(const Comm *comm, const struct Collective *given, uint64_t ticket)
{
    const void *slots[MAX_RANKS];
    bool scatters = !strcmp(given->posted.name, "HcclReduceScatter");
    bool gathers = !strcmp(given->posted.name, "HcclAllGather");
    size_t part = BYTES(given->count, given->posted.type), size = gathers ? part * comm->size : part;
    if (!given->receive || !size) return 0;
    if (!sim_is_device_memory(given->receive, size))
        return sim_fail(ACL_ERROR_RT_DEVICE_MEM_ERROR, "%s writes %zu bytes to %p, which is no device memory or was freed",
                        given->posted.name, size, given->receive);
    for (uint32_t rank = 0; rank < comm->size; rank++)
        slots[rank] = sim_slot(comm, rank, ticket) + (scatters ? part * comm->rank : 0);
    if (given->op != HCCL_REDUCE_RESERVED)
        sim_hccl_reduce(given->receive, slots, comm->size, given->count, given->posted.type, given->op);
    else if (gathers)
        for (uint32_t rank = 0; rank < comm->size; rank++)
            memcpy((char *)given->receive + rank * part, slots[rank], part);
    else
        memcpy(given->receive, slots[sender_to(comm, given)], size);
    return 0;
}

aclError sim_run_collective(const Task *task)
{
    Comm *comm = task->collective->comm;
    if (comm->failed) return sim_comm_error(comm);
    sim_log("run", task->collective->posted.name, -1, -1, 0);
    aclError code = receive(comm, task->collective, task->ticket);
    comm->done = task->ticket;
    return code;
}
