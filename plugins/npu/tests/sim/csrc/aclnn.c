/* aclnn: the objects that describe arguments, the preparation of a call (GetWorkspaceSize) and its launch.
 *
 * The arithmetic is not here. sim.marshal registers, for each kernel, a string of letters that says how its arguments
 * are passed; a launch hands the copied arguments to one Python function. */
#include <dlfcn.h>

#include "sim.h"

/* ---- objects: sim.marshal mirrors these structures */
#define MAX_DIMS 8

typedef struct SimTensor {
    int32_t magic, type, num_dims, format;
    int64_t dims[MAX_DIMS], strides[MAX_DIMS];
    int64_t offset;
    char *data;
    struct SimTensor *origin;  /* of a copy: the caller's, for outputs whose size the kernel finds */
} SimTensor;

typedef struct {
    int32_t magic, type;
    char value[16];
} SimScalar;

/* A list of either kind of value; of objects it holds pointers. */
typedef struct {
    int32_t magic, unused;
    int64_t size;
    char values[];
} SimList;

static size_t size_of(int type)
{
    switch (type) {
        case ACL_INT8: case ACL_UINT8: case ACL_BOOL: case ACL_HIFLOAT8: case ACL_FLOAT8_E5M2:
        case ACL_FLOAT8_E4M3FN: case ACL_FLOAT8_E8M0: case ACL_INT4: case ACL_FLOAT4_E2M1: case ACL_FLOAT4_E1M2: return 1;
        case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
        case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: case ACL_COMPLEX32: return 4;
        case ACL_COMPLEX128: return 16;
        default: return 8;
    }
}

EXPORT void *aclCreateTensor(const int64_t *dims, uint64_t num_dims, int type, const int64_t *strides, int64_t offset,
                             int format, const int64_t *storage_dims, uint64_t num_storage_dims, void *data)
{
    (void)storage_dims;
    (void)num_storage_dims;
    if (num_dims > MAX_DIMS) {
        sim_fail(ACL_ERROR_RT_PARAM_INVALID, "a tensor of %llu dimensions", (unsigned long long)num_dims);
        return NULL;
    }
    SimTensor *tensor = calloc(1, sizeof *tensor);
    tensor->magic = MAGIC_TENSOR;
    tensor->type = type;
    tensor->num_dims = (int32_t)num_dims;
    tensor->format = format;
    tensor->offset = offset;
    tensor->data = data;
    if (num_dims) memcpy(tensor->dims, dims, num_dims * sizeof *dims);
    if (num_dims) memcpy(tensor->strides, strides, num_dims * sizeof *strides);
    return tensor;
}

EXPORT void *aclCreateScalar(const void *value, int type)
{
    SimScalar *scalar = calloc(1, sizeof *scalar);
    scalar->magic = MAGIC_SCALAR;
    scalar->type = type;
    memcpy(scalar->value, value, size_of(type));
    return scalar;
}

static void *create_list(int magic, const void *values, uint64_t size, size_t each)
{
    SimList *list = calloc(1, sizeof *list + size * each);
    list->magic = magic;
    list->size = (int64_t)size;
    if (size) memcpy(list->values, values, size * each);
    return list;
}

EXPORT void *aclCreateIntArray(const int64_t *values, uint64_t size)
{
    return create_list(MAGIC_INTS, values, size, sizeof *values);
}

EXPORT void *aclCreateBoolArray(const bool *values, uint64_t size)
{
    return create_list(MAGIC_BOOLS, values, size, sizeof *values);
}

EXPORT void *aclCreateFloatArray(const float *values, uint64_t size)
{
    return create_list(MAGIC_FLOATS, values, size, sizeof *values);
}

EXPORT void *aclCreateTensorList(void *const *values, uint64_t size)
{
    return create_list(MAGIC_TENSORS, values, size, sizeof *values);
}

EXPORT void *aclCreateScalarList(void *const *values, uint64_t size)
{
    return create_list(MAGIC_SCALARS, values, size, sizeof *values);
}

static void destroy(void *object)
{
    SimList *list = object;
    if (!object) return;
    if (list->magic == MAGIC_TENSORS || list->magic == MAGIC_SCALARS)
        for (int64_t i = 0; i < list->size; i++) destroy(((void **)list->values)[i]);
    free(object);
}

/* A list owns its members, as in the real library. */
#define DESTROY(function)                                                                                             \
    EXPORT int function(void *object)                                                                                 \
    {                                                                                                                 \
        destroy(object);                                                                                              \
        return 0;                                                                                                     \
    }
DESTROY(aclDestroyTensor)
DESTROY(aclDestroyScalar)
DESTROY(aclDestroyIntArray)
DESTROY(aclDestroyBoolArray)
DESTROY(aclDestroyFloatArray)
DESTROY(aclDestroyTensorList)
DESTROY(aclDestroyScalarList)

static void *copy(const void *object)
{
    const SimList *list = object;
    if (!object) return NULL;
    size_t each = list->magic == MAGIC_INTS ? 8 : list->magic == MAGIC_FLOATS ? 4 : list->magic == MAGIC_BOOLS ? 1 : 8;
    size_t size = list->magic == MAGIC_TENSOR   ? sizeof(SimTensor)
                  : list->magic == MAGIC_SCALAR ? sizeof(SimScalar)
                                                : sizeof *list + list->size * each;
    SimList *made = malloc(size);
    memcpy(made, object, size);
    if (list->magic == MAGIC_TENSOR) ((SimTensor *)made)->origin = (SimTensor *)object;
    if (list->magic == MAGIC_TENSORS || list->magic == MAGIC_SCALARS)
        for (int64_t i = 0; i < list->size; i++) ((void **)made->values)[i] = copy(((void **)list->values)[i]);
    return made;
}

/* ---- outputs whose size only the kernel knows (nonzero, unique): the caller waits for the kernel, then asks.
 * The array is the caller's, who releases it with delete[], which is free() in libstdc++. */
EXPORT int aclGetViewShape(const SimTensor *tensor, int64_t **dims, uint64_t *num_dims)
{
    *num_dims = tensor->num_dims;
    *dims = malloc((tensor->num_dims + 1) * sizeof **dims);
    memcpy(*dims, tensor->dims, tensor->num_dims * sizeof **dims);
    return 0;
}

EXPORT void ascend_sim_set_shape(SimTensor *tensor, const int64_t *dims, int num_dims)
{
    tensor->origin->num_dims = num_dims;
    memcpy(tensor->origin->dims, dims, num_dims * sizeof *dims);
}

/* ---- kernels known to sim.marshal */
typedef struct {
    char name[MAX_NAME], spec[MAX_WORDS + MAX_DOUBLES + 1];
    bool checked;
} Kernel;

typedef int (*Handler)(const char *name, Executor *executor);
static Kernel *kernels;
static int num_kernels, kernel_room;
static Handler handler;

EXPORT int ascend_sim_register(const char *name, const char *spec)
{
    if (strlen(name) >= MAX_NAME || strlen(spec) > MAX_WORDS) return -1;
    sim_lock();
    int place = 0;
    while (place < num_kernels && strcmp(kernels[place].name, name)) place++;
    if (place == num_kernels && num_kernels++ == kernel_room) {
        kernel_room = kernel_room ? 2 * kernel_room : 256;
        kernels = realloc(kernels, kernel_room * sizeof *kernels);
    }
    snprintf(kernels[place].name, MAX_NAME, "%s", name);
    snprintf(kernels[place].spec, sizeof kernels->spec, "%s", spec);
    kernels[place].checked = false;
    sim_unlock();
    return 0;
}

EXPORT void ascend_sim_set_handler(Handler function)
{
    handler = function;
}

static Kernel *kernel_named(const char *name)
{
    for (int i = 0; i < num_kernels; i++)
        if (!strcmp(kernels[i].name, name)) return &kernels[i];
    return NULL;
}

/* Import the module that registers the kernels, at the first call of one: no program needs to know of the simulation.
 * Python's functions are found in the process, since this library is not linked to them. */
static void load_handlers(void)
{
    static bool tried;
    const char *module = getenv("ASCEND_SIM_KERNELS");
    if (tried || !module || !*module) return;
    int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    void *(*import)(const char *) = dlsym(RTLD_DEFAULT, "PyImport_ImportModule");
    void (*print)(void) = dlsym(RTLD_DEFAULT, "PyErr_Print");
    if (!ensure || !release || !import || !print) return;
    int state = ensure();
    /* Threads that come meanwhile import too, and so wait for the one that came first. */
    if (!import(module)) print();
    tried = true;
    release(state);
}

void sim_executor_release(Executor *executor)
{
    if (--executor->references) return;
    for (int i = 0, word = 0; executor->spec[i]; i++) {
        char letter = executor->spec[i];
        if (letter == 'D' || letter == 'F') continue;
        if (strchr("TSABRLZ", letter)) destroy((void *)executor->words[word]);
        if (letter == 'C') free((void *)executor->words[word]);
        word++;
    }
    free(executor);
}

/* Of a call that was prepared and is not launched: one that was asked for its workspace only. */
EXPORT int aclDestroyAclOpExecutor(Executor *executor)
{
    if (!executor) return 0;
    sim_lock();
    executor->references = 1;
    sim_executor_release(executor);
    sim_unlock();
    return 0;
}

/* ---- the generated aclnn functions call these two */
static __thread char letters[MAX_WORDS + 1];

/* A specification that does not fit the call would read values for addresses: the first call of each is compared. */
static bool fits(const char *spec, const char *seen)
{
    for (; *spec; spec++) {
        if (*spec == 'D' || *spec == 'F') continue;
        if (!*seen) return false;
        bool object = strchr("TSABRLZ", *spec), seen_object = strchr("TSABRLZ", *seen);
        if (*seen != '0' && (object || seen_object) && *spec != *seen) return false;
        seen++;
    }
    return !*seen;
}

EXPORT long sim_prepare(const char *name, const int64_t *words, const double *doubles)
{
    if (!sim_num_devices()) return ACL_ERROR_RT_NO_DEVICE;
    load_handlers();
    sim_lock();
    Kernel *kernel = kernel_named(name);
    aclError code = 0;
    if (!kernel || !kernel->checked) sim_guess(words, letters, sizeof letters);
    if (kernel && !kernel->checked && !fits(kernel->spec, letters)) {
        code = sim_fail(ACL_ERROR_RT_PARAM_INVALID, "kernel %s is specified as \"%s\" and called with \"%s\"", name,
                        kernel->spec, letters);
        sim_unlock();
        return code;
    }
    if (kernel) kernel->checked = true;
    if (!kernel) {
        sim_log("missing", name, -1, -1, 0);
        code = sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                        "kernel %s has no handler in sim/kernels; its arguments look like \"%s\"", name, letters);
        /* Without strictness its outputs stay as they were, which runtime.not_computed() tells. */
        if (!sim_setting("ASCEND_SIM_STRICT", 1)) code = 0;
        sim_unlock();
        return code;
    }
    Executor *executor = calloc(1, sizeof *executor);
    snprintf(executor->name, MAX_NAME, "%s", name);
    snprintf(executor->spec, sizeof executor->spec, "%s", kernel->spec);
    memcpy(executor->doubles, doubles, sizeof executor->doubles);
    int word = 0;
    for (const char *letter = kernel->spec; *letter; letter++) {
        if (*letter == 'D' || *letter == 'F') continue;
        int64_t given = words[word];
        executor->words[word++] = strchr("TSABRLZ", *letter) ? (int64_t)copy((void *)given)
                                  : *letter == 'C' && given  ? (int64_t)strdup((char *)given)
                                                             : given;
    }
    sim_unlock();
    *(uint64_t *)words[word] = 0;
    *(Executor **)words[word + 1] = executor;
    return 0;
}

EXPORT long sim_launch(const char *name, Executor *executor, aclrtStream handle)
{
    ENTER(name);
    Stream *stream = sim_stream(handle);
    if (!executor) {
        const Kernel *kernel = kernel_named(name);
        if (kernel)
            LEAVE(sim_fail(ACL_ERROR_RT_PARAM_INVALID, "kernel %s is specified as \"%s\" and called with \"%s\"", name,
                           kernel->spec, letters));
        if (sim_setting("ASCEND_SIM_STRICT", 1))
            LEAVE(sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                           "kernel %s has no handler in sim/kernels; its arguments look like \"%s\"", name, letters));
        sim_log("not_computed", name, stream->id, stream->capture ? stream->capture->id : -1, 0);
        LEAVE(0);
    }
    aclError code;
    executor->references++;
    if (stream->update) {
        code = sim_update_kernel(stream, executor);
    } else {
        const Graph *graph = stream->capture;
        sim_log(graph ? "capture" : "launch", name, stream->id, graph ? graph->id : -1, stream->group);
        code = sim_issue(stream, (Task){.kind = TASK_KERNEL, .executor = executor});
    }
    sim_executor_release(executor);
    LEAVE(code);
}

/* ---- execution */
static aclError check_tensor(const char *name, const SimTensor *tensor)
{
    int64_t low = tensor->offset, high = tensor->offset;
    for (int i = 0; i < tensor->num_dims; i++) {
        if (tensor->dims[i] == 0) return 0;
        int64_t reach = (tensor->dims[i] - 1) * tensor->strides[i];
        *(reach < 0 ? &low : &high) += reach;
    }
    size_t each = size_of(tensor->type);
    if (sim_is_device_memory(tensor->data + low * (int64_t)each, (size_t)(high - low + 1) * each)) return 0;
    return sim_fail(ACL_ERROR_RT_AICORE_EXCEPTION, "%s reads or writes %p, which is no device memory or was freed", name,
                    (void *)tensor->data);
}

/* What a real kernel reports as a fault of the memory unit: arguments outside of what is allocated now. */
static aclError check_memory(const char *name, const void *object)
{
    const SimList *list = object;
    if (!object) return 0;
    if (list->magic == MAGIC_TENSOR) return check_tensor(name, object);
    aclError code = 0;
    if (list->magic == MAGIC_TENSORS)
        for (int64_t i = 0; i < list->size && !code; i++) code = check_memory(name, ((void **)list->values)[i]);
    return code;
}

aclError sim_run_kernel(Executor *executor)
{
    int word = 0;
    for (const char *letter = executor->spec; *letter; letter++) {
        if (*letter == 'D' || *letter == 'F') continue;
        const void *object = (const void *)executor->words[word++];
        aclError code = *letter == 'T' || *letter == 'L' ? check_memory(executor->name, object) : 0;
        if (code) return code;
    }
    if (!handler) return sim_fail(ACL_ERROR_RT_INTERNAL_ERROR, "%s: no handler is installed", executor->name);
    sim_log("run", executor->name, -1, -1, 0);
    executor->references++;
    sim_unlock();
    int code = handler(executor->name, executor);
    sim_lock();
    sim_executor_release(executor);
    return code;
}
