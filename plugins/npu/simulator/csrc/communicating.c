/* Kernels that exchange tensors with other ranks: their formulas post and gather bytes through these functions.
 *
 * Such a kernel has the letter G in its specification, the name of a communicator. It takes its turn among the
 * communicator's collectives, and waits for the other ranks in the thread that runs it. */
#include "sim_hccl.h"

#define POLL_NS 50000

static __thread Comm *running;
static __thread uint64_t turn;

aclError sim_begin_exchange(const Task *task, const Executor *executor)
{
    running = NULL;
    if (!executor->group) return 0;
    running = sim_comm_named(executor->group);
    turn = task->ticket;
    if (!running) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: no communicator %s", executor->name, executor->group);
    return running->failed ? sim_comm_error(running) : 0;
}

/* A rank that has not exchanged would leave the others waiting. */
aclError sim_end_exchange(const Executor *executor, aclError code)
{
    Comm *comm = running;
    running = NULL;
    if (!comm) return code;
    if (!code && comm->announced < turn) code = sim_comm_fail(comm, "%s has exchanged nothing", executor->name);
    if (code && comm->announced < turn) sim_comm_fail(comm, "%s has failed", executor->name);
    comm->done = turn;
    return code;
}

/* Rank and size of the communicator of the kernel that this thread runs; false where it has none. */
EXPORT bool ascend_sim_place(int32_t *rank, int32_t *size)
{
    if (!running) return false;
    *rank = (int32_t)running->rank;
    *size = (int32_t)running->size;
    return true;
}

/* Give `bytes` bytes to the others and get those of all, one after another; an error where that can't be. */
EXPORT int ascend_sim_exchange(const char *name, const void *payload, uint64_t bytes, char *gathered)
{
    Comm *comm = running;
    sim_lock();
    aclError code = 0;
    Posted posted = {.bytes = bytes, .op = HCCL_REDUCE_RESERVED};
    snprintf(posted.name, sizeof posted.name, "%s", name);
    if (bytes > sim_slot_bytes())
        code = sim_comm_fail(comm, "%s of %llu bytes; ASCEND_SIM_HCCL_MB is %zu", name, (unsigned long long)bytes,
                             sim_slot_bytes() >> 20);
    else
        sim_announce(comm, turn, &posted, payload, bytes);
    while (!code && !sim_all_posted(comm, turn)) {
        sim_unlock();
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
        sim_lock();
    }
    if (!code && comm->failed) code = sim_comm_error(comm);
    for (uint32_t rank = 0; !code && rank < comm->size; rank++)
        memcpy(gathered + rank * bytes, sim_slot(comm, rank, turn), bytes);
    sim_unlock();
    return code;
}
