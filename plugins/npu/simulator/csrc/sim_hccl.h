/* What the parts of the simulated HCCL share: communicators and their collectives. Expect sim_lock, as in sim.h. */
#ifndef ASCEND_SIM_HCCL_H
#define ASCEND_SIM_HCCL_H

#include <stdatomic.h>

#include "sim.h"
#include "hccl_types.h"  /* of the wheel, as build.py makes it C */

#define MAX_RANKS MAX_DEVICES
#define NUM_SLOTS 2  /* a rank that posts collective n has seen all others post n - 1, so n - 2 is read by nobody */

/* What a rank says of a collective; all ranks must say the same, except of send and receive. */
typedef struct {
    char name[32];
    uint64_t bytes;  /* that each rank posts, of a broadcast those of the root */
    int32_t type, op, root, unused;
} Posted;

/* The part of the shared memory that one rank writes. */
typedef struct {
    _Atomic uint64_t posted;  /* how many collectives this rank has posted */
    _Atomic int32_t joined, failed;
    Posted last[NUM_SLOTS];
} RankState;

typedef struct Comm {
    char name[COMM_NAME_MAX_LENGTH];
    uint32_t rank, size;
    int file;
    char *memory;
    uint64_t issued, done;  /* collectives put on a stream, and those that ended */
    uint64_t announced;     /* the last that this rank has posted */
    double waits_since;
    const char *failed;     /* why nothing more can be done with it */
    bool destroyed;
    int references;
    struct Comm *next;
} Comm;

struct Collective {
    Comm *comm;
    Posted posted;
    HcclReduceOp op;
    void *send, *receive;
    uint64_t count;  /* elements that one rank sends, of a reduce-scatter those that one rank receives */
    int references;
};

Comm *sim_comm_named(const char *name);
void sim_comm_release(Comm *comm);

/* ---- shared memory of the ranks (exchange.c) */
size_t sim_slot_bytes(void);
RankState *sim_rank_state(const Comm *comm, uint32_t rank);
char *sim_slot(const Comm *comm, uint32_t rank, uint64_t ticket);
/* These two drop the lock. */
HcclResult sim_make_room(int32_t *file);
HcclResult sim_join(Comm *comm, int32_t process, int32_t file);
void sim_leave(Comm *comm);
void sim_announce(Comm *comm, uint64_t ticket, const Posted *posted, const void *payload, size_t size);
bool sim_all_posted(Comm *comm, uint64_t ticket);
aclError sim_comm_error(const Comm *comm);  /* tells again why it has failed */
aclError sim_comm_fail(Comm *comm, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- arithmetic (reduce.c) */
size_t sim_hccl_size(HcclDataType type);  /* bytes of an element, 0 for a type that is not moved */
bool sim_hccl_reduces(HcclDataType type, HcclReduceOp op);
void sim_hccl_reduce(void *into, const void *const *from, uint32_t num, uint64_t count, HcclDataType type,
                     HcclReduceOp op);

#endif
