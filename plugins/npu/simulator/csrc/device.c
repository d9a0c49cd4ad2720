/* Devices, contexts and what the runtime says about itself. */
#include <stdarg.h>

#include "sim.h"

static __thread int current = -1;
static char contexts[MAX_DEVICES];  /* only their addresses matter: the context of device i is &contexts[i] */

int sim_num_devices(void)
{
    static int count = -1;
    if (count < 0) {
        int64_t asked = sim_setting("ASCEND_SIM_DEVICES", 0);
        count = asked < 0 ? 0 : asked > MAX_DEVICES ? MAX_DEVICES : (int)asked;
    }
    return count;
}

int sim_device(void)
{
    return current;
}

EXPORT aclError aclInit(const char *path)
{
    (void)path;
    ENTER("aclInit");
    LEAVE(0);
}

EXPORT aclError aclFinalize(void)
{
    return 0;
}

EXPORT aclError aclrtGetDeviceCount(uint32_t *count)
{
    *count = sim_num_devices();
    return 0;
}

EXPORT aclError aclrtSetDevice(int32_t device)
{
    ENTER("aclrtSetDevice");
    if (device < 0 || device >= sim_num_devices())
        LEAVE(sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d of %d", device, sim_num_devices()));
    if (device != current) sim_log("device", "set", -1, -1, device);
    current = device;
    LEAVE(0);
}

EXPORT aclError aclrtResetDevice(int32_t device)
{
    (void)device;
    return 0;
}

EXPORT aclError aclrtGetDevice(int32_t *device)
{
    if (!sim_num_devices()) return ACL_ERROR_RT_NO_DEVICE;
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current;
    return 0;
}

EXPORT aclError aclrtGetCurrentContext(aclrtContext *context)
{
    if (!sim_num_devices()) return ACL_ERROR_RT_NO_DEVICE;
    if (current < 0) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = &contexts[current];
    return 0;
}

EXPORT aclError aclrtSetCurrentContext(aclrtContext context)
{
    char *place = context;
    if (place < contexts || place >= contexts + sim_num_devices()) return ACL_ERROR_RT_CONTEXT_NULL;
    current = (int)(place - contexts);
    return 0;
}

EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    (void)device;
    if (!sim_num_devices()) return ACL_ERROR_RT_NO_DEVICE;
    if (flags) *flags = 0;
    if (active) *active = current >= 0;
    return 0;
}

/* ---- descriptions */
EXPORT const char *aclrtGetSocName(void)
{
    const char *name = getenv("ASCEND_SIM_SOC");
    return !sim_num_devices() ? NULL : name && *name ? name : "Ascend910B3";
}

/* Numbers of an Ascend 910B: 24 cube cores, 48 vector cores. Code asks for them to size its workspaces. */
#define NUM_CUBE_CORES 24
#define NUM_VECTOR_CORES 48

EXPORT aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value)
{
    (void)device;
    ENTER("aclGetDeviceCapability");
    *value = info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? NUM_VECTOR_CORES : NUM_CUBE_CORES;
    LEAVE(0);
}

EXPORT aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value)
{
    (void)device;
    ENTER("aclrtGetDeviceInfo");
    *value = attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM ? NUM_VECTOR_CORES : NUM_CUBE_CORES;
    LEAVE(0);
}

static aclError core_limit(aclrtDevResLimitType kind, uint32_t *value)
{
    *value = kind == ACL_RT_DEV_RES_VECTOR_CORE ? NUM_VECTOR_CORES : NUM_CUBE_CORES;
    return 0;
}

EXPORT aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType kind, uint32_t *value)
{
    (void)stream;
    return core_limit(kind, value);
}

EXPORT aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType kind, uint32_t *value)
{
    (void)device;
    return core_limit(kind, value);
}

EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType kind, uint32_t *value)
{
    return core_limit(kind, value);
}

EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    *can = device != peer;
    return 0;
}

EXPORT aclError aclsysGetVersionStr(char *package, char *version)
{
    const char *asked = getenv("ASCEND_SIM_CANN_VERSION");
    (void)package;
    strcpy(version, asked && *asked ? asked : "9.1.0");
    return 0;
}

EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version)
{
    char text[64];
    (void)name;
    memset(version, 0, sizeof *version);
    aclsysGetVersionStr(NULL, text);
    snprintf(version->version, sizeof version->version, "%s", text);
    sscanf(text, "%7[^.].%7[^.].%7[^.]", version->majorVersion, version->minorVersion, version->releaseVersion);
    return 0;
}

/* ---- options of the operator compiler: torch_npu reads the size first and refuses 0 */
EXPORT size_t aclGetCompileoptSize(int option)
{
    (void)option;
    return 16;
}

EXPORT int aclGetCompileopt(int option, char *value, size_t size)
{
    (void)option;
    snprintf(value, size, "disable");
    return 0;
}

EXPORT aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count)
{
    static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
    *list = attributes;
    *count = sizeof attributes / sizeof *attributes;
    return 0;
}

EXPORT aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value)
{
    *value = attribute == ACL_CANN_ATTR_INF_NAN || attribute == ACL_CANN_ATTR_BF16;
    return 0;
}

EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value)
{
    (void)option;
    *value = 0;
    return 0;
}

/* ---- the profiler's clock, and the checked string functions of CANN's C library */
EXPORT uint64_t MsprofSysCycleTime(void)
{
    return 0;
}

EXPORT uint64_t MsprofGetHashId(const char *text, size_t size)
{
    (void)text;
    (void)size;
    return 0;
}

EXPORT int strcpy_s(char *destination, size_t size, const char *source)
{
    if (strlen(source) + 1 > size) return 34;  /* ERANGE */
    strcpy(destination, source);
    return 0;
}

EXPORT int vsnprintf_s(char *destination, size_t size, size_t count, const char *format, va_list arguments)
{
    (void)count;
    return vsnprintf(destination, size, format, arguments);
}

EXPORT int snprintf_s(char *destination, size_t size, size_t count, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int written = vsnprintf_s(destination, size, count, format, arguments);
    va_end(arguments);
    return written;
}
