/* What tests see and do: the log of events, messages of errors, failures on demand. */
#include <stdarg.h>

#include "sim.h"

/* ---- settings */
int64_t sim_setting(const char *name, int64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoll(text, NULL, 10) : otherwise;
}

/* ---- log: kept in memory, read by simulator.runtime, which mirrors this structure */
typedef struct {
    char kind[24];
    char name[MAX_NAME];
    int32_t stream, graph;
    int64_t value;
} LogEntry;

#define MAX_LOG (1 << 21)  /* about 300 MB: a bound against runaway loops, not a size that tests reach */
static LogEntry *entries;
static int64_t num_entries, room, num_dropped;
static FILE *trace;

void sim_log(const char *kind, const char *name, int stream, int graph, int64_t value)
{
    static bool opened;
    if (!opened) {
        const char *path = getenv("ASCEND_SIM_LOG");
        opened = true;
        trace = !path || !*path ? NULL : strcmp(path, "-") ? fopen(path, "a") : stderr;
        if (trace) setvbuf(trace, NULL, _IOLBF, 0);
    }
    if (trace) fprintf(trace, "%s %s stream=%d graph=%d value=%lld\n", kind, name, stream, graph, (long long)value);
    if (num_entries == room) {
        int64_t wanted = room ? 2 * room : 4096;
        LogEntry *larger = wanted > MAX_LOG ? NULL : realloc(entries, wanted * sizeof *entries);
        if (!larger) {
            num_dropped++;
            return;
        }
        entries = larger;
        room = wanted;
    }
    LogEntry *entry = &entries[num_entries++];
    memset(entry, 0, sizeof *entry);
    snprintf(entry->kind, sizeof entry->kind, "%s", kind);
    snprintf(entry->name, sizeof entry->name, "%s", name);
    entry->stream = stream;
    entry->graph = graph;
    entry->value = value;
}

EXPORT int64_t ascend_sim_log_size(int64_t *dropped)
{
    sim_lock();
    int64_t size = num_entries;
    *dropped = num_dropped;
    sim_unlock();
    return size;
}

EXPORT void ascend_sim_log_read(int64_t first, int64_t count, LogEntry *into)
{
    sim_lock();
    if (first >= 0 && first + count <= num_entries) memcpy(into, entries + first, count * sizeof *into);
    sim_unlock();
}

EXPORT void ascend_sim_log_clear(void)
{
    sim_lock();
    num_entries = num_dropped = 0;
    sim_unlock();
}

/* ---- errors: the last message of each thread, which torch_npu shows in the exception */
static __thread char message[1024];
static __thread aclError last_code;

aclError sim_fail(aclError code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    last_code = code;
    sim_log("error", message, -1, -1, code);
    return code;
}

EXPORT const char *aclGetRecentErrMsg(void)
{
    return message[0] ? message : NULL;
}

EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel level)
{
    (void)level;
    return last_code;
}

EXPORT aclError aclrtGetLastError(aclrtLastErrLevel level)
{
    (void)level;
    aclError code = last_code;
    last_code = 0;
    return code;
}

EXPORT void ascend_sim_set_message(const char *text)
{
    snprintf(message, sizeof message, "%s", text);
}

/* ---- failures on demand */
typedef struct {
    char function[MAX_NAME];
    aclError code;
    int after;  /* calls that still succeed */
} Failure;

#define MAX_FAILURES 32
static Failure failures[MAX_FAILURES];
static int num_failures;

EXPORT int ascend_sim_fail_next(const char *function, int code, int after)
{
    sim_lock();
    bool fits = num_failures < MAX_FAILURES;
    if (fits) {
        Failure *failure = &failures[num_failures++];
        snprintf(failure->function, sizeof failure->function, "%s", function);
        failure->code = code;
        failure->after = after;
    }
    sim_unlock();
    return fits ? 0 : -1;
}

EXPORT int ascend_sim_forget_failures(void)
{
    sim_lock();
    int left = num_failures;
    num_failures = 0;
    sim_unlock();
    return left;
}

aclError sim_injected(const char *function)
{
    for (int i = 0; i < num_failures; i++) {
        if (strcmp(failures[i].function, function)) continue;
        if (failures[i].after-- > 0) return 0;
        aclError code = failures[i].code;
        failures[i] = failures[--num_failures];
        return sim_fail(code, "%s: failure injected by a test", function);
    }
    return 0;
}

/* ---- functions of the real libraries that are not simulated */
EXPORT long sim_unsupported(const char *function)
{
    /* Answers that change nothing here: settings of a compiler, a profiler or a dump that this runtime lacks. */
    static const char *const harmless[] = {
        "aclSetCompileopt", "aclmdlInitDump", "aclmdlSetDump", "aclmdlFinalizeDump", "aclrtSetOpWaitTimeout",
        "aclrtSetOpExecuteTimeOut", "aclrtSetOpExecuteTimeOutV2", "aclrtSetSysParamOpt", "aclrtCtxSetSysParamOpt",
        "aclrtSetDeviceSatMode", "aclrtSetStreamFailureMode", "aclrtSetStreamOverflowSwitch", "aclrtSetStreamAttribute",
        "aclrtUseStreamResInCurrentThread", "aclrtUnuseStreamResInCurrentThread", "aclrtDeviceEnablePeerAccess",
        "aclAppLog", "MsprofRegisterCallback", "MsprofReportApi", "MsprofReportCompactInfo", "HcclSetConfig",
        "MsprofReportAdditionalInfo", "aclopStartDumpArgs", "aclopStopDumpArgs", "aclrtSetStreamResLimit",
        "aclrtResetStreamResLimit", "aclDestroyAclOpExecutor", "aclprofFinalize", "aclprofStop",
    };
    sim_lock();
    long code = ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    for (size_t i = 0; i < sizeof harmless / sizeof *harmless; i++)
        if (!strcmp(harmless[i], function)) code = 0;
    if (!sim_num_devices()) code = ACL_ERROR_RT_NO_DEVICE;
    sim_log(code ? "unsupported" : "call", function, -1, -1, code);
    if (code) sim_fail(code, "%s is not simulated", function);
    sim_unlock();
    return code;
}

/* libstdc++ throws and demangles for us, so that this stays C; its exception reaches Python as a RuntimeError. */
void throw_runtime_error(const char *) __asm__("_ZSt21__throw_runtime_errorPKc");
char *__cxa_demangle(const char *, char *, size_t *, int *);

void sim_throw(const char *text)
{
    throw_runtime_error(text);
    __builtin_unreachable();
}

EXPORT void sim_unsupported_cxx(const char *mangled)
{
    static __thread char text[512];
    int status = 0;
    char *readable = __cxa_demangle(mangled, NULL, NULL, &status);
    snprintf(text, sizeof text, "the simulated ACL runtime has no C++ interfaces; called: %s", readable ? readable : mangled);
    free(readable);
    throw_runtime_error(text);
}

EXPORT const char *ascend_sim_version(void)
{
    return "1";
}
