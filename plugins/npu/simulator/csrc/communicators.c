/* HCCL's communicators: made from a root's information, named, destroyed. */
#include "sim_hccl.h"

#include <unistd.h>

static Comm *comms;

typedef struct {
    int32_t process, file, number;
} Root;

static HcclResult as_hccl(aclError code)
{
    return code ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

void sim_comm_release(Comm *comm)
{
    if (--comm->references) return;
    sim_leave(comm);
    free((void *)comm->failed);
    free(comm);
}

Comm *sim_comm_named(const char *name)
{
    for (Comm *comm = comms; comm; comm = comm->next)
        if (!strcmp(comm->name, name)) return comm;
    return NULL;
}

EXPORT HcclResult HcclGetRootInfo(HcclRootInfo *information)
{
    static int32_t last_number;
    Root *root = (Root *)information->internal;
    sim_lock();
    HcclResult code = as_hccl(sim_injected("HcclGetRootInfo"));
    root->process = getpid();
    root->number = ++last_number;
    if (!code) code = sim_make_room(&root->file);
    sim_unlock();
    return code;
}

EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *information, uint32_t rank,
                                             const HcclCommConfig *config, HcclComm *handle)
{
    const Root *root = (const Root *)information->internal;
    if (!size || size > MAX_RANKS || rank >= size) return HCCL_E_PARA;
    Comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->size = size;
    comm->file = -1;
    comm->references = 1;
    if (config && config->hcclCommName[0])
        snprintf(comm->name, sizeof comm->name, "%s", config->hcclCommName);
    else
        snprintf(comm->name, sizeof comm->name, "simulated_%d_%d", root->process, root->number);
    void *interpreter = sim_let_go();
    HcclResult code = sim_join(comm, root->process, root->file);
    if (interpreter) sim_take_again(interpreter);
    sim_lock();
    sim_log("communicator", comm->name, -1, -1, size);
    if (code) {
        sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "HCCL communicator %s: %s", comm->name,
                 code == HCCL_E_TIMEOUT ? "not all ranks have joined in time"
                 : code == HCCL_E_PARA  ? "another process has joined as this rank"
                                        : "rank 0's memory can't be opened");
        sim_comm_release(comm);
    } else {
        if (size > 1) sim_start_progress();
        comm->next = comms;
        comms = comm;
        *handle = comm;
    }
    sim_unlock();
    return code;
}

EXPORT HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *information, uint32_t rank,
                                       HcclComm *handle)
{
    return HcclCommInitRootInfoConfig(size, information, rank, NULL, handle);
}

EXPORT HcclResult HcclCommDestroy(HcclComm handle)
{
    Comm *comm = handle;
    sim_lock();
    Comm **place = &comms;
    while (*place && *place != comm) place = &(*place)->next;
    if (*place) *place = comm->next;
    comm->destroyed = true;
    sim_comm_release(comm);
    sim_unlock();
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetCommName(HcclComm handle, char *name)
{
    strcpy(name, ((const Comm *)handle)->name);
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetRankSize(HcclComm handle, uint32_t *size)
{
    *size = ((const Comm *)handle)->size;
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank)
{
    *rank = ((const Comm *)handle)->rank;
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult *code)
{
    sim_lock();
    *code = ((const Comm *)handle)->failed ? HCCL_E_REMOTE : HCCL_SUCCESS;
    sim_unlock();
    return HCCL_SUCCESS;
}

EXPORT const char *HcclGetErrorString(HcclResult code)
{
    return code == HCCL_SUCCESS ? "no error" : "error of the simulated HCCL";
}

EXPORT uint32_t HcclGetCommConfigCapability(void)
{
    return HCCL_COMM_CONFIG_RESERVED;
}
