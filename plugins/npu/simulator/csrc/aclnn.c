/* aclnn: the preparation of a call (GetWorkspaceSize) and its launch.
 *
 * The arithmetic is not here. simulator.marshal registers, for each kernel, a string of letters that says how its
 * arguments are passed; a launch hands the copied arguments to one Python function. */
#include <dlfcn.h>

#include "sim.h"

/* ---- kernels known to simulator.marshal */
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
        if (strchr(OBJECT_LETTERS, letter)) sim_destroy((void *)executor->words[word]);
        if (letter == 'C' || letter == 'G') free((void *)executor->words[word]);
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
        bool object = strchr(OBJECT_LETTERS, *spec), seen_object = strchr(OBJECT_LETTERS, *seen);
        if (*seen != '0' && (object || seen_object) && *spec != *seen) return false;
        seen++;
    }
    return !*seen;
}

aclError sim_prepare_call(const char *name, const int64_t *words, const double *doubles, Executor **made)
{
    *made = NULL;
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
                        "kernel %s has no handler in simulator/kernels; its arguments look like \"%s\"", name, letters);
        /* Without strictness its outputs stay as they were, which runtime.not_computed() tells. */
        if (!sim_setting("ASCEND_SIM_STRICT", 1)) code = 0;
        sim_unlock();
        return code;
    }
    Executor *executor = calloc(1, sizeof *executor);
    snprintf(executor->name, MAX_NAME, "%s", name);
    snprintf(executor->spec, sizeof executor->spec, "%s", kernel->spec);
    memcpy(executor->doubles, doubles, sizeof executor->doubles);
    for (const char *letter = kernel->spec; *letter; letter++) {
        if (*letter == 'D' || *letter == 'F') continue;
        int64_t given = words[executor->num_words];
        executor->words[executor->num_words++] = strchr(OBJECT_LETTERS, *letter) ? (int64_t)sim_copy((void *)given)
                                                 : strchr("CG", *letter) && given ? (int64_t)strdup((char *)given)
                                                                                  : given;
        if (*letter == 'G') executor->group = (char *)executor->words[executor->num_words - 1];
    }
    sim_unlock();
    *made = executor;
    return 0;
}

EXPORT long sim_prepare(const char *name, const int64_t *words, const double *doubles)
{
    Executor *executor;
    aclError code = sim_prepare_call(name, words, doubles, &executor);
    if (!executor) return code;
    *(uint64_t *)words[executor->num_words] = 0;
    *(Executor **)words[executor->num_words + 1] = executor;
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
                           "kernel %s has no handler in simulator/kernels; its arguments look like \"%s\"", name,
                           letters));
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
    if (tensor->owned) return 0;
    for (int i = 0; i < tensor->num_dims; i++) {
        if (tensor->dims[i] == 0) return 0;
        int64_t reach = (tensor->dims[i] - 1) * tensor->strides[i];
        *(reach < 0 ? &low : &high) += reach;
    }
    size_t each = sim_size_of(tensor->type);
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

/* Kernels of ATB take lengths as tensors of the host, which live as long as the call that prepares them. */
static aclError own_host_data(SimTensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->num_dims; i++) count *= tensor->dims[i];
    size_t size = (size_t)count * sim_size_of(tensor->type), begin = (size_t)tensor->offset * sim_size_of(tensor->type);
    if (!size || sim_is_device_memory(tensor->data + begin, size)) return 0;
    tensor->owned = malloc(size);
    if (!sim_read(tensor->data + begin, tensor->owned, size))
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%p is memory neither of the device nor of the host",
                        (void *)tensor->data);
    tensor->data = tensor->owned;
    tensor->offset = 0;
    return 0;
}

aclError sim_own_host_data(Executor *executor)
{
    aclError code = 0;
    int word = 0;
    for (const char *letter = executor->spec; *letter && !code; letter++) {
        if (*letter == 'D' || *letter == 'F') continue;
        SimList *object = (SimList *)executor->words[word++];
        if (*letter == 'T' && object) code = own_host_data((SimTensor *)object);
        for (int64_t i = 0; *letter == 'L' && object && i < object->size && !code; i++)
            if (((void **)object->values)[i]) code = own_host_data(((SimTensor **)object->values)[i]);
    }
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
