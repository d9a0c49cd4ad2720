/* The shared memory through which the ranks of one communicator, processes of this machine, exchange tensors.
 *
 * It is a file without a name, which rank 0 makes and the others open by its number in rank 0's process. Each rank
 * writes a state and two slots of its own; pages that nobody touches cost nothing. A rank holds a lock on a byte of the
 * file as long as it lives, so the others see its end. */
#define _GNU_SOURCE
#include "sim_hccl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>

#define STATE_BYTES 4096
#define DEFAULT_SLOT_MB 256
#define CONNECT_TIMEOUT_S 120   /* HCCL_CONNECT_TIMEOUT's default */
#define EXECUTE_TIMEOUT_S 1836  /* HCCL_EXEC_TIMEOUT's default */
#define POLL_NS 100000

size_t sim_slot_bytes(void)
{
    return (size_t)sim_setting("ASCEND_SIM_HCCL_MB", DEFAULT_SLOT_MB) << 20;
}

static size_t memory_bytes(const Comm *comm)
{
    return comm->size * (STATE_BYTES + NUM_SLOTS * sim_slot_bytes());
}

RankState *sim_rank_state(const Comm *comm, uint32_t rank)
{
    return (RankState *)(comm->memory + rank * STATE_BYTES);
}

char *sim_slot(const Comm *comm, uint32_t rank, uint64_t ticket)
{
    size_t slots = comm->size * STATE_BYTES, place = rank * NUM_SLOTS + ticket % NUM_SLOTS;
    return comm->memory + slots + place * sim_slot_bytes();
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

aclError sim_comm_error(const Comm *comm)
{
    return sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "HCCL communicator %s, rank %u of %u: %s", comm->name, comm->rank,
                    comm->size, comm->failed);
}

/* The communicator can't be used any more; the other ranks see it too. */
aclError sim_comm_fail(Comm *comm, const char *format, ...)
{
    char text[256];
    if (!comm->failed) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        comm->failed = strdup(text);
        sim_rank_state(comm, comm->rank)->failed = 1;
    }
    return sim_comm_error(comm);
}

/* ---- joining and leaving. Locks belong to an opened file (F_OFD_…), which a process has for itself. */
static bool lives(const Comm *comm, uint32_t rank)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(comm->file, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK;
}

HcclResult sim_make_room(int32_t *file)
{
    *file = memfd_create("ascend-sim-hccl", MFD_CLOEXEC);
    return *file < 0 ? HCCL_E_SYSCALL : HCCL_SUCCESS;
}

static bool all_joined(const Comm *comm)
{
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (!atomic_load(&sim_rank_state(comm, rank)->joined)) return false;
    return true;
}

HcclResult sim_join(Comm *comm, int32_t process, int32_t file)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
    comm->file = open(path, O_RDWR | O_CLOEXEC);
    if (comm->file < 0 || ftruncate(comm->file, (off_t)memory_bytes(comm))) return HCCL_E_SYSCALL;
    int flags = MAP_SHARED | MAP_NORESERVE;
    comm->memory = mmap(NULL, memory_bytes(comm), PROT_READ | PROT_WRITE, flags, comm->file, 0);
    if (comm->memory == MAP_FAILED) return HCCL_E_MEMORY;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = comm->rank, .l_len = 1};
    if (fcntl(comm->file, F_OFD_SETLK, &lock)) return HCCL_E_PARA;  /* two processes of one rank */
    atomic_store(&sim_rank_state(comm, comm->rank)->joined, 1);
    double until = now() + (double)sim_setting("HCCL_CONNECT_TIMEOUT", CONNECT_TIMEOUT_S);
    while (!all_joined(comm)) {
        if (now() > until) return HCCL_E_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    if (process == getpid()) close(file);
    return HCCL_SUCCESS;
}

void sim_leave(Comm *comm)
{
    if (comm->memory && comm->memory != MAP_FAILED) munmap(comm->memory, memory_bytes(comm));
    if (comm->file >= 0) close(comm->file);
    comm->memory = NULL;
    comm->file = -1;
}

/* ---- exchanging */
void sim_announce(Comm *comm, uint64_t ticket, const Posted *posted, const void *payload, size_t size)
{
    RankState *state = sim_rank_state(comm, comm->rank);
    if (size) memcpy(sim_slot(comm, comm->rank, ticket), payload, size);
    state->last[ticket % NUM_SLOTS] = *posted;
    comm->announced = ticket;
    comm->waits_since = now();
    atomic_store_explicit(&state->posted, ticket, memory_order_release);
}

static bool differ(const Posted *own, const Posted *other)
{
    bool sends = !strcmp(own->name, "HcclSend") && !strcmp(other->name, "HcclRecv");
    bool receives = !strcmp(own->name, "HcclRecv") && !strcmp(other->name, "HcclSend");
    bool paired = sends || receives;
    bool alone = !strcmp(own->name, "HcclSend") || !strcmp(own->name, "HcclRecv");
    if (alone ? !paired : strcmp(own->name, other->name) != 0) return true;
    return own->bytes != other->bytes || own->type != other->type || own->op != other->op || own->root != other->root;
}

/* Whether nothing is left to wait for: every rank has posted this collective, or the communicator has failed. */
bool sim_all_posted(Comm *comm, uint64_t ticket)
{
    for (uint32_t rank = 0; rank < comm->size && !comm->failed; rank++) {
        RankState *state = sim_rank_state(comm, rank);
        if (atomic_load_explicit(&state->posted, memory_order_acquire) < ticket) {
            /* Its end is looked at first, and whether it had posted before that once more. */
            bool gone = !lives(comm, rank), failed = atomic_load(&state->failed);
            if (atomic_load_explicit(&state->posted, memory_order_acquire) >= ticket) continue;
            if (gone) sim_comm_fail(comm, "rank %u has ended or left", rank);
            if (failed) sim_comm_fail(comm, "rank %u has failed", rank);
            double limit_s = (double)sim_setting("HCCL_EXEC_TIMEOUT", EXECUTE_TIMEOUT_S);
            if (now() - comm->waits_since > limit_s)
                sim_comm_fail(comm, "waits in %s for rank %u for more than %g s",
                              sim_rank_state(comm, comm->rank)->last[ticket % NUM_SLOTS].name, rank, limit_s);
            return comm->failed != NULL;
        }
        const Posted *own = &sim_rank_state(comm, comm->rank)->last[ticket % NUM_SLOTS];
        const Posted *other = &state->last[ticket % NUM_SLOTS];
        if (rank != comm->rank && differ(own, other))
            sim_comm_fail(comm, "calls %s of %llu bytes (type %d, op %d, root %d) where rank %u calls %s of %llu (%d, %d, %d)",
                          own->name, (unsigned long long)own->bytes, own->type, own->op, own->root, rank, other->name,
                          (unsigned long long)other->bytes, other->type, other->op, other->root);
    }
    return true;
}
