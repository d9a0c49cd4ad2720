/* Device and pinned host memory: ordinary memory of this process with a record of every block, so that a kernel that
 * names memory it does not own fails, and so that used and free bytes are true. */
#include "sim.h"

typedef struct {
    char *start;
    size_t size;
    int device;  /* -1: pinned host memory */
} Block;

static Block *blocks;  /* sorted by address */
static int num_blocks, num_room;
static size_t used[MAX_DEVICES], peak[MAX_DEVICES];

#define ALIGNMENT 512
#define POISON 0xFF  /* a NaN in every floating type, -1 in the integers */

static bool poisoning(void)
{
    return sim_setting("ASCEND_SIM_POISON", 0) != 0;
}

static size_t total_bytes(void)
{
    return (size_t)sim_setting("ASCEND_SIM_MEMORY_MB", 65536) << 20;
}

/* The index of the first block that ends after the address. */
static int find(const char *address)
{
    int low = 0, high = num_blocks;
    while (low < high) {
        int middle = (low + high) / 2;
        if (blocks[middle].start + blocks[middle].size > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static const Block *block_of(const void *address, size_t size)
{
    const char *start = address;
    int place = find(start);
    if (place == num_blocks || blocks[place].start > start) return NULL;
    return start + size <= blocks[place].start + blocks[place].size ? &blocks[place] : NULL;
}

bool sim_is_device_memory(const void *address, size_t size)
{
    const Block *block = block_of(address, size);
    return block && block->device >= 0;
}

bool sim_is_known_memory(const void *address, size_t size)
{
    return block_of(address, size) != NULL;
}

static aclError allocate(void **address, size_t size, int device)
{
    if (device >= 0 && used[device] + size > total_bytes())
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "out of device memory: %zu bytes asked, %zu of %zu free", size,
                        total_bytes() - used[device], total_bytes());
    size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    char *start = aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT);
    if (!start) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no %zu bytes", size);
    if (poisoning()) memset(start, POISON, rounded);
    if (num_blocks == num_room) {
        num_room = num_room ? 2 * num_room : 256;
        blocks = realloc(blocks, num_room * sizeof *blocks);
        if (!blocks) abort();
    }
    int place = find(start);
    memmove(blocks + place + 1, blocks + place, (num_blocks++ - place) * sizeof *blocks);
    blocks[place] = (Block){start, rounded ? rounded : ALIGNMENT, device};
    if (device >= 0) {
        used[device] += blocks[place].size;
        if (used[device] > peak[device]) peak[device] = used[device];
    }
    sim_log(device >= 0 ? "malloc" : "malloc_host", "", -1, -1, (int64_t)size);
    *address = start;
    return 0;
}

/* Freed memory is kept for a while where it is poisoned: a later reader finds NaN and not a new owner's values. */
#define NUM_QUARANTINED 64
static void discard(char *start, size_t size)
{
    static char *quarantine[NUM_QUARANTINED];
    static int next;
    if (!poisoning()) {
        free(start);
        return;
    }
    memset(start, POISON, size);
    free(quarantine[next]);
    quarantine[next] = start;
    next = (next + 1) % NUM_QUARANTINED;
}

static aclError release(void *address, bool host)
{
    if (!address) return 0;
    const Block *block = block_of(address, 1);
    if (!block || block->start != address || (block->device < 0) != host)
        return sim_fail(ACL_ERROR_RT_MEMORY_FREE, "%p is not the start of an allocated block", address);
    if (block->device >= 0) used[block->device] -= block->size;
    sim_log(host ? "free_host" : "free", "", -1, -1, (int64_t)block->size);
    discard(block->start, block->size);
    int place = (int)(block - blocks);
    memmove(blocks + place, blocks + place + 1, (--num_blocks - place) * sizeof *blocks);
    return 0;
}

static aclError allocate_on_device(const char *function, void **address, size_t size)
{
    aclError code = sim_unsafe(function, true);
    if (code) return code;
    if (sim_device() < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "%s: no device is set", function);
    return allocate(address, size, sim_device());
}

EXPORT aclError aclrtMalloc(void **address, size_t size, aclrtMemMallocPolicy policy)
{
    (void)policy;
    ENTER("aclrtMalloc");
    LEAVE(allocate_on_device("aclrtMalloc", address, size));
}

EXPORT aclError aclrtMallocAlign32(void **address, size_t size, aclrtMemMallocPolicy policy)
{
    (void)policy;
    ENTER("aclrtMalloc");
    LEAVE(allocate_on_device("aclrtMallocAlign32", address, size));
}

EXPORT aclError aclrtMallocHost(void **address, size_t size)
{
    ENTER("aclrtMallocHost");
    LEAVE(allocate(address, size, -1));
}

EXPORT aclError aclrtMallocHostWithCfg(void **address, uint64_t size, aclrtMallocConfig *configuration)
{
    (void)configuration;
    ENTER("aclrtMallocHost");
    LEAVE(allocate(address, size, -1));
}

EXPORT aclError aclrtFree(void *address)
{
    ENTER("aclrtFree");
    LEAVE(release(address, false));
}

EXPORT aclError aclrtFreeHost(void *address)
{
    ENTER("aclrtFreeHost");
    LEAVE(release(address, true));
}

EXPORT aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *all_bytes)
{
    (void)attribute;
    ENTER("aclrtGetMemInfo");
    if (sim_device() < 0) LEAVE(ACL_ERROR_RT_CONTEXT_NULL);
    *all_bytes = total_bytes();
    *free_bytes = total_bytes() - used[sim_device()];
    LEAVE(0);
}

EXPORT aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes)
{
    ENTER("aclrtPointerGetAttributes");
    const Block *block = block_of(address, 1);
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = !block              ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                : block->device < 0 ? ACL_MEM_LOCATION_TYPE_HOST
                                                    : ACL_MEM_LOCATION_TYPE_DEVICE;
    attributes->location.id = block && block->device >= 0 ? (uint32_t)block->device : 0;
    LEAVE(0);
}

/* Asked after faults, to tell broken memory from a program's mistake; simulated memory does not break. */
EXPORT aclError aclrtGetMemUceInfo(int32_t device, aclrtMemUceInfo *list, size_t room, size_t *count)
{
    (void)device;
    (void)list;
    (void)room;
    *count = 0;
    return 0;
}

EXPORT void ascend_sim_memory(int device, uint64_t *now, uint64_t *highest, uint64_t *num_live)
{
    sim_lock();
    *now = used[device];
    *highest = peak[device];
    *num_live = 0;
    for (int i = 0; i < num_blocks; i++) *num_live += blocks[i].device == device;
    sim_unlock();
}

/* ---- copies */
static bool touches_host(aclrtMemcpyKind kind)
{
    return kind != ACL_MEMCPY_DEVICE_TO_DEVICE && kind != ACL_MEMCPY_INNER_DEVICE_TO_DEVICE;
}

static aclError check_copy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind)
{
    if (size > room) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "copy of %zu bytes into %zu", size, room);
    bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || !touches_host(kind);
    bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST || !touches_host(kind);
    if (size && to_device && !sim_is_device_memory(to, size))
        return sim_fail(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "copy of %zu bytes to %p, no device memory", size, to);
    if (size && from_device && !sim_is_device_memory(from, size))
        return sim_fail(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "copy of %zu bytes from %p, no device memory", size, from);
    return 0;
}

EXPORT aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind)
{
    ENTER("aclrtMemcpy");
    aclError code = sim_unsafe("aclrtMemcpy", false);
    if (!code) code = check_copy(to, room, from, size, kind);
    if (!code) memcpy(to, from, size);
    sim_log("copy", "blocking", -1, -1, (int64_t)size);
    LEAVE(code);
}

EXPORT aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind,
                                 aclrtStream handle)
{
    ENTER("aclrtMemcpyAsync");
    Stream *stream = sim_stream(handle);
    aclError code = check_copy(to, room, from, size, kind);
    const void *host = kind == ACL_MEMCPY_HOST_TO_DEVICE ? from : kind == ACL_MEMCPY_DEVICE_TO_HOST ? to : NULL;
    if (!code && host && !sim_is_known_memory(host, size)) {
        /* The driver turns a copy of pageable memory into a synchronous one, which a capture cannot hold. */
        if (stream->capture) {
            sim_capture_invalidate(stream->capture, "a copy of pageable host memory");
            LEAVE(sim_fail(ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC, "copy of pageable host memory in a capture"));
        }
        code = sim_drain(stream);
        if (!code) memcpy(to, from, size);
        sim_log("copy", "pageable", stream->id, -1, (int64_t)size);
        LEAVE(code);
    }
    if (code) LEAVE(code);
    sim_log("copy", "async", stream->id, stream->capture ? stream->capture->id : -1, (int64_t)size);
    LEAVE(sim_issue(stream, (Task){.kind = TASK_COPY, .destination = to, .source = from, .size = size}));
}

EXPORT aclError aclrtMemset(void *address, size_t room, int32_t value, size_t size)
{
    ENTER("aclrtMemset");
    aclError code = sim_unsafe("aclrtMemset", false);
    if (!code && size > room) code = sim_fail(ACL_ERROR_RT_PARAM_INVALID, "fill of %zu bytes in %zu", size, room);
    if (!code) memset(address, value, size);
    LEAVE(code);
}

EXPORT aclError aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t size, aclrtStream handle)
{
    ENTER("aclrtMemsetAsync");
    Stream *stream = sim_stream(handle);
    if (size > room) LEAVE(sim_fail(ACL_ERROR_RT_PARAM_INVALID, "fill of %zu bytes in %zu", size, room));
    sim_log("fill", "async", stream->id, stream->capture ? stream->capture->id : -1, (int64_t)size);
    LEAVE(sim_issue(stream, (Task){.kind = TASK_FILL, .destination = address, .value = value, .size = size}));
}
