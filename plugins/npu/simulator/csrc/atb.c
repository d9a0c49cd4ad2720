/* ATB: operations as C++ objects made of a parameter struct, and functions Atb… that take arguments as aclnn's do.
 *
 * C++ classes without data are tables of functions; both are written here as they lie in memory (Itanium ABI), since
 * the build needs a C compiler only. The arithmetic is simulator.marshal's as for aclnn: an operation is a kernel of
 * three arguments, the bytes of its parameters (P), its inputs and its outputs (L). */
#include "sim.h"

/* ---- what torch_npu and the library exchange */
typedef struct {
    int32_t type, format;
    int64_t dims[8];
    uint64_t num_dims;
    void *device_data, *host_data;
    uint64_t size;
} AtbTensor;

#define ROOM 64

typedef struct {
    size_t capacity, size;
    AtbTensor own[ROOM + 1];
    AtbTensor *heap;
} AtbTensors;

typedef struct {
    AtbTensors in, out;
} VariantPack;

typedef struct {
    const void *const *functions;
    aclrtStream stream;
} Context;

typedef struct {
    const void *const *functions;
    char name[MAX_NAME];
    void *parameters;
    Executor *prepared;
} Operation;

/* std::string as it lies in memory; longer ones are on the heap, which is what its own functions release. */
typedef struct {
    char *data;
    size_t size, capacity, unused;
} String;

enum { WORKSPACE = 512, ATB_INTERNAL_ERROR = 3 };

/* Of a status torch_npu says only that it failed, or nothing: an exception takes the message along. */
static void refuse(const char *name, long code)
{
    static __thread char text[1200];
    const char *message = aclGetRecentErrMsg();
    snprintf(text, sizeof text, "%s, error code %ld: %s", name, code, message ? message : "");
    sim_throw(text);
}

/* ---- contexts: a stream each */
static int context_set_stream(Context *context, aclrtStream stream)
{
    context->stream = stream;
    return 0;
}

static aclrtStream context_get_stream(const Context *context)
{
    return context->stream;
}

static int context_set_copies(Context *context, bool enable)
{
    (void)context;
    (void)enable;
    return 0;
}

static bool context_get_copies(const Context *context)
{
    (void)context;
    return false;
}

static void keep(void *object)
{
    (void)object;
}

static const void *const context_functions[] = {
    (void *)keep, (void *)free, (void *)context_set_stream, (void *)context_get_stream, (void *)context_set_copies,
    (void *)context_get_copies,
};

EXPORT int create_context(Context **context) __asm__("_ZN3atb13CreateContextEPPNS_7ContextE");
EXPORT int create_context(Context **context)
{
    *context = calloc(1, sizeof **context);
    (*context)->functions = context_functions;
    return 0;
}

EXPORT int destroy_context(Context *context) __asm__("_ZN3atb14DestroyContextEPNS_7ContextE");
EXPORT int destroy_context(Context *context)
{
    free(context);
    return 0;
}

/* ---- operations */
static String operation_name(const Operation *operation)
{
    size_t size = strlen(operation->name), room = size < 32 ? 32 : size;
    String name = {malloc(room + 1), size, room, 0};
    memcpy(name.data, operation->name, size + 1);
    return name;
}

static int infer_shape(const Operation *operation, const void *in, void *out)
{
    (void)in;
    (void)out;
    refuse(operation->name, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    return ATB_INTERNAL_ERROR;
}

static uint32_t count_unknown(const Operation *operation)
{
    refuse(operation->name, ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    return 0;
}

static void *described(const AtbTensors *tensors)
{
    void *made[ROOM];
    for (size_t i = 0; i < tensors->size; i++) {
        const AtbTensor *tensor = &(tensors->heap ? tensors->heap : tensors->own)[i];
        void *data = tensor->device_data ? tensor->device_data : tensor->host_data;
        int64_t strides[8], stride = 1;
        made[i] = NULL;
        if (!data) continue;
        for (int dim = (int)tensor->num_dims - 1; dim >= 0; stride *= tensor->dims[dim--]) strides[dim] = stride;
        made[i] = aclCreateTensor(tensor->dims, tensor->num_dims, tensor->type, strides, 0, tensor->format,
                                  tensor->dims, tensor->num_dims, data);
    }
    return sim_create_list(MAGIC_TENSORS, made, tensors->size, sizeof *made);
}

/* Let go of what the operation last prepared, as the workspace's size may be asked for without a launch. */
static long prepare(Operation *operation, Executor *prepared)
{
    aclDestroyAclOpExecutor(operation->prepared);
    operation->prepared = prepared;
    sim_lock();
    long code = prepared ? sim_own_host_data(prepared) : 0;
    sim_unlock();
    return code;
}

static int setup(Operation *operation, const VariantPack *pack, uint64_t *workspace, Context *context)
{
    (void)context;
    const double doubles[MAX_DOUBLES] = {0};
    const int64_t end[2] = {0};
    void *in = described(&pack->in), *out = described(&pack->out);
    int64_t words[MAX_WORDS] = {(int64_t)operation->parameters, (int64_t)in, (int64_t)out, (int64_t)end,
                                (int64_t)(end + 1)};
    Executor *prepared;
    long code = sim_prepare_call(operation->name, words, doubles, &prepared);
    sim_destroy(in);
    sim_destroy(out);
    if (!code) code = prepare(operation, prepared);
    if (code) refuse(operation->name, code);
    *workspace = WORKSPACE;
    return 0;
}

static int execute(Operation *operation, const VariantPack *pack, void *room, uint64_t size, Context *context)
{
    (void)pack;
    (void)room;
    (void)size;
    Executor *prepared = operation->prepared;
    operation->prepared = NULL;
    long code = sim_launch(operation->name, prepared, context->stream);
    if (code) refuse(operation->name, code);
    return 0;
}

static void operation_end(Operation *operation)
{
    aclDestroyAclOpExecutor(operation->prepared);
    sim_destroy(operation->parameters);
    free(operation);
}

static const void *const operation_functions[] = {
    (void *)keep,          (void *)operation_end, (void *)operation_name, (void *)infer_shape,
    (void *)count_unknown, (void *)count_unknown, (void *)setup,          (void *)execute,
};

static Operation *create_operation(const char *name, const void *parameters, size_t size)
{
    Operation *operation = calloc(1, sizeof *operation);
    operation->functions = operation_functions;
    snprintf(operation->name, sizeof operation->name, "%s", name);
    operation->parameters = sim_create_list(MAGIC_BYTES, parameters, size, 1);
    return operation;
}

EXPORT int destroy_operation(Operation *operation) __asm__("_ZN3atb16DestroyOperationEPNS_9OperationE");
EXPORT int destroy_operation(Operation *operation)
{
    if (operation) operation_end(operation);
    return 0;
}

/* One for each struct of parameters; simulator/atb.py reads its fields. length: of the struct's name; size: in bytes. */
#define CREATE(param, length, size)                                                                                    \
    EXPORT int create_##param(const void *parameters, Operation **operation)                                           \
        __asm__("_ZN3atb15CreateOperationINS_5infer" #length #param "ParamEEEiRKT_PPNS_9OperationE");                  \
    EXPORT int create_##param(const void *parameters, Operation **operation)                                           \
    {                                                                                                                  \
        *operation = create_operation("Atb" #param, parameters, size);                                                 \
        return 0;                                                                                                      \
    }
CREATE(Elewise, 12, 64)
CREATE(GroupTopk, 14, 24)
CREATE(Linear, 11, 32)
CREATE(PagedAttention, 19, 120)
CREATE(ReshapeAndCache, 20, 24)
CREATE(RmsNorm, 12, 144)
CREATE(Rope, 9, 16)
CREATE(SelfAttention, 18, 144)

EXPORT uint64_t tensor_size(const AtbTensor *tensor) __asm__("_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE");
EXPORT uint64_t tensor_size(const AtbTensor *tensor)
{
    uint64_t count = tensor->num_dims ? sim_size_of(tensor->type) : 0;
    for (uint64_t i = 0; i < tensor->num_dims; i++) count *= (uint64_t)tensor->dims[i];
    return count;
}

/* ---- the generated functions Atb…GetWorkspaceSize and Atb… call these two; the former's last three arguments are the
 * workspace's size, the operation, which may be one of an earlier call, and the context */
EXPORT long sim_atb_prepare(const char *name, const int64_t *words, const double *doubles)
{
    Executor *prepared;
    long code = sim_prepare_call(name, words, doubles, &prepared);
    if (code) refuse(name, code);
    if (!prepared) return 0;
    Operation **operation = (Operation **)words[prepared->num_words + 1];
    *(uint64_t *)words[prepared->num_words] = WORKSPACE;
    if (!*operation) *operation = create_operation(name, NULL, 0);
    code = prepare(*operation, prepared);
    if (code) refuse(name, code);
    return 0;
}

EXPORT long sim_atb_launch(const char *name, Operation *operation, const Context *context)
{
    Executor *prepared = operation ? operation->prepared : NULL;
    if (operation) operation->prepared = NULL;
    long code = sim_launch(name, prepared, context->stream);
    if (code) refuse(name, code);
    return 0;
}
