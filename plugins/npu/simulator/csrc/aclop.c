/* aclop: the older way to run a kernel, by the operator's name, with descriptions of tensors apart from their memory.
 *
 * A few of torch_npu's ops still take it. The kernel of operator X is aclopX, of inputs and outputs (L) and of the
 * attributes as text (C): name=value; for each. */
#include "acl/acl_op_compiler.h"
#include "sim.h"

struct aclDataBuffer {
    void *data;
    size_t size;
};

struct aclopAttr {
    char text[1024];
};

/* A description is a tensor without memory. */
EXPORT aclTensorDesc *aclCreateTensorDesc(aclDataType type, int num_dims, const int64_t *dims, aclFormat format)
{
    int64_t strides[MAX_DIMS], stride = 1;
    for (int dim = num_dims - 1; dim >= 0; stride *= dims[dim--]) strides[dim] = stride;
    return (aclTensorDesc *)aclCreateTensor(dims, num_dims, type, strides, 0, format, dims, num_dims, NULL);
}

EXPORT void aclDestroyTensorDesc(const aclTensorDesc *description)
{
    sim_destroy((void *)description);
}

/* How a tensor is stored, which need not be how it was described. */
EXPORT aclError aclSetTensorFormat(aclTensorDesc *description, aclFormat format)
{
    ((SimTensor *)description)->format = format;
    return 0;
}

EXPORT aclError aclSetTensorShape(aclTensorDesc *description, int num_dims, const int64_t *dims)
{
    SimTensor *tensor = (SimTensor *)description;
    if (num_dims > MAX_DIMS) return ACL_ERROR_RT_PARAM_INVALID;
    tensor->num_stored = num_dims;
    memcpy(tensor->stored, dims, num_dims * sizeof *dims);
    return 0;
}

/* A host's tensor is recognised by its memory. */
EXPORT aclError aclSetTensorPlaceMent(aclTensorDesc *description, aclMemType where)
{
    (void)description;
    (void)where;
    return 0;
}

EXPORT void aclSetTensorDescName(aclTensorDesc *description, const char *name)
{
    (void)description;
    (void)name;
}

EXPORT aclDataBuffer *aclCreateDataBuffer(void *data, size_t size)
{
    aclDataBuffer *buffer = malloc(sizeof *buffer);
    *buffer = (aclDataBuffer){data, size};
    return buffer;
}

EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer *buffer)
{
    free((void *)buffer);
    return 0;
}

EXPORT aclopAttr *aclopCreateAttr(void)
{
    return calloc(1, sizeof(aclopAttr));
}

EXPORT void aclopDestroyAttr(const aclopAttr *attributes)
{
    free((void *)attributes);
}

#define SET_ATTRIBUTE(function, type, format)                                                                          \
    EXPORT aclError function(aclopAttr *attributes, const char *name, type value)                                          \
    {                                                                                                                  \
        size_t used = strlen(attributes->text);                                                                        \
        snprintf(attributes->text + used, sizeof attributes->text - used, "%s=" format ";", name, value);              \
        return 0;                                                                                                      \
    }
SET_ATTRIBUTE(aclopSetAttrBool, uint8_t, "%d")
SET_ATTRIBUTE(aclopSetAttrInt, int64_t, "%ld")
SET_ATTRIBUTE(aclopSetAttrFloat, float, "%.9g")
SET_ATTRIBUTE(aclopSetAttrString, const char *, "%s")

/* The caller's descriptions stay its own; the list is a copy. */
static void *with_memory(int count, const aclTensorDesc *const *descriptions, const aclDataBuffer *const *buffers)
{
    void *list = sim_create_list(MAGIC_TENSORS, descriptions, count, sizeof *descriptions);
    void *made = sim_copy(list);
    free(list);
    for (int i = 0; i < count; i++) ((SimTensor **)((SimList *)made)->values)[i]->data = buffers[i]->data;
    return made;
}

EXPORT aclError aclopCompileAndExecute(const char *type, int num_inputs, const aclTensorDesc *const *inputs,
                                       const aclDataBuffer *const *from, int num_outputs,
                                       const aclTensorDesc *const *outputs, aclDataBuffer *const *to,
                                       const aclopAttr *attributes, aclopEngineType engine, aclopCompileType compiled,
                                       const char *path, aclrtStream stream)
{
    (void)engine;
    (void)compiled;
    (void)path;
    char name[MAX_NAME];
    const double doubles[MAX_DOUBLES] = {0};
    const int64_t end[2] = {0};
    snprintf(name, sizeof name, "aclop%s", type);
    void *in = with_memory(num_inputs, inputs, from);
    void *out = with_memory(num_outputs, outputs, (const aclDataBuffer *const *)to);
    int64_t words[MAX_WORDS] = {(int64_t)in, (int64_t)out, (int64_t)(attributes ? attributes->text : ""), (int64_t)end,
                                (int64_t)(end + 1)};
    Executor *executor;
    aclError code = sim_prepare_call(name, words, doubles, &executor);
    sim_destroy(in);
    sim_destroy(out);
    if (code) return code;
    sim_lock();
    if (executor) code = sim_own_host_data(executor);
    sim_unlock();
    return code ? code : sim_launch(name, executor, stream);
}
