/* Task groups: the part of a graph whose arguments can be replaced between replays. */
#include "sim.h"

EXPORT aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle)
{
    ENTER("aclmdlRICaptureTaskGrpBegin");
    Stream *stream = sim_stream(handle);
    if (!stream->capture) LEAVE(sim_fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group outside a capture"));
    if (stream->group) LEAVE(sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "a task group inside a task group"));
    stream->group = ++stream->capture->num_groups;
    sim_log("group_begin", "", stream->id, stream->capture->id, stream->group);
    LEAVE(0);
}

EXPORT aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group)
{
    ENTER("aclmdlRICaptureTaskGrpEnd");
    Stream *stream = sim_stream(handle);
    if (!stream->capture) LEAVE(sim_fail(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group outside a capture"));
    if (!stream->group) LEAVE(sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no task group is open"));
    TaskGroup *made = calloc(1, sizeof *made);
    *made = (TaskGroup){stream->capture, stream->group};
    sim_log("group_end", "", stream->id, stream->capture->id, stream->group);
    stream->group = 0;
    *group = made;
    LEAVE(0);
}

static Task *kernel_in_group(Task *node, int group)
{
    while (node && !(node->group == group && node->kind == TASK_KERNEL)) node = node->next;
    return node;
}

EXPORT aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group)
{
    ENTER("aclmdlRICaptureTaskUpdateBegin");
    Stream *stream = sim_stream(handle);
    TaskGroup *target = group;
    if (target->graph->destroyed || !target->graph->finished)
        LEAVE(sim_fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "the graph of the task group is %s",
                       target->graph->destroyed ? "destroyed" : "still captured"));
    if (stream->capture) LEAVE(sim_fail(ACL_ERROR_RT_STREAM_CAPTURED, "an update on a captured stream"));
    if (stream->update) LEAVE(sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "an update inside an update"));
    stream->update = target;
    stream->update_next = kernel_in_group(target->graph->first, target->id);
    sim_log("update_begin", "", stream->id, target->graph->id, target->id);
    LEAVE(0);
}

/* A kernel launched during an update runs nowhere: its arguments become those of the group's next kernel. */
aclError sim_update_kernel(Stream *stream, Executor *executor)
{
    TaskGroup *group = stream->update;
    Task *node = stream->update_next;
    if (!node || strcmp(node->executor->name, executor->name))
        return sim_fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "task group %d of graph %d has %s where the update has %s",
                        group->id, group->graph->id, node ? node->executor->name : "nothing", executor->name);
    stream->update_next = kernel_in_group(node->next, group->id);
    sim_log("update", executor->name, stream->id, group->graph->id, group->id);
    sim_push(stream, &(Task){.kind = TASK_UPDATE, .node = node, .executor = executor, .graph = group->graph});
    return sim_settle();
}

EXPORT aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle)
{
    ENTER("aclmdlRICaptureTaskUpdateEnd");
    Stream *stream = sim_stream(handle);
    TaskGroup *group = stream->update;
    if (!group) LEAVE(sim_fail(ACL_ERROR_STREAM_TASK_GROUP_STATUS, "no update is under way"));
    const Task *missing = stream->update_next;
    stream->update = NULL;
    stream->update_next = NULL;
    sim_log("update_end", "", stream->id, group->graph->id, group->id);
    if (missing)
        LEAVE(sim_fail(ACL_ERROR_RT_MODEL_UPDATE_FAILED, "the update of task group %d ends before %s", group->id,
                       missing->executor->name));
    LEAVE(0);
}
