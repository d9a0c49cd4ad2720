/* Descriptions of graphs, for people and for tests. */
#include "sim.h"

static const char *kind_name(TaskKind kind)
{
    static const char *const names[] = {"kernel",     "copy",        "fill",   "record",    "wait",
                                        "value_wait", "value_write", "update", "collective", "host_call", "graph_end"};
    return names[kind];
}

static const char *name_of(const Task *node)
{
    return node->executor ? node->executor->name : node->collective ? sim_collective_name(node->collective) : "";
}

EXPORT aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char *path, uint32_t flags)
{
    const Graph *graph = handle;
    (void)flags;
    ENTER("aclmdlRIDebugJsonPrint");
    FILE *file = fopen(path, "w");
    if (!file) LEAVE(sim_fail(ACL_ERROR_RT_FILE_OPEN, "cannot write %s", path));
    fprintf(file, "[");
    for (const Task *node = graph->first; node; node = node->next)
        fprintf(file, "%s\n  {\"kind\": \"%s\", \"name\": \"%s\", \"stream\": %d, \"group\": %d}",
                node == graph->first ? "" : ",", kind_name(node->kind), name_of(node),
                node->stream_id, node->group);
    fprintf(file, "\n]\n");
    fclose(file);
    LEAVE(0);
}

EXPORT aclError aclmdlRIDebugPrint(aclmdlRI handle)
{
    const Graph *graph = handle;
    ENTER("aclmdlRIDebugPrint");
    for (const Task *node = graph->first; node; node = node->next)
        fprintf(stderr, "graph %d: %s %s stream %d group %d\n", graph->id, kind_name(node->kind),
                name_of(node), node->stream_id, node->group);
    LEAVE(0);
}

EXPORT void ascend_sim_counts(int64_t *streams, int64_t *streams_of_graphs)
{
    sim_lock();
    *streams = sim_count_streams();
    *streams_of_graphs = sim_count_graph_streams();
    sim_unlock();
}
