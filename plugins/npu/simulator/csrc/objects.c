/* The objects that describe the arguments of kernels, their copies, and the sizes of storage formats. */
#include "sim.h"

size_t sim_size_of(int type)
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
    if (num_dims > MAX_DIMS || num_storage_dims > MAX_DIMS) {
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
    tensor->num_stored = (int64_t)num_storage_dims;
    if (num_storage_dims) memcpy(tensor->stored, storage_dims, num_storage_dims * sizeof *storage_dims);
    return tensor;
}

EXPORT void *aclCreateScalar(const void *value, int type)
{
    SimScalar *scalar = calloc(1, sizeof *scalar);
    scalar->magic = MAGIC_SCALAR;
    scalar->type = type;
    memcpy(scalar->value, value, sim_size_of(type));
    return scalar;
}

EXPORT void *sim_create_list(int magic, const void *values, uint64_t size, size_t each)
{
    SimList *list = calloc(1, sizeof *list + size * each);
    list->magic = magic;
    list->size = (int64_t)size;
    if (size) memcpy(list->values, values, size * each);
    return list;
}

EXPORT void *aclCreateIntArray(const int64_t *values, uint64_t size)
{
    return sim_create_list(MAGIC_INTS, values, size, sizeof *values);
}

EXPORT void *aclCreateBoolArray(const bool *values, uint64_t size)
{
    return sim_create_list(MAGIC_BOOLS, values, size, sizeof *values);
}

EXPORT void *aclCreateFloatArray(const float *values, uint64_t size)
{
    return sim_create_list(MAGIC_FLOATS, values, size, sizeof *values);
}

EXPORT void *aclCreateTensorList(void *const *values, uint64_t size)
{
    return sim_create_list(MAGIC_TENSORS, values, size, sizeof *values);
}

EXPORT void *aclCreateScalarList(void *const *values, uint64_t size)
{
    return sim_create_list(MAGIC_SCALARS, values, size, sizeof *values);
}

void sim_destroy(void *object)
{
    SimList *list = object;
    if (!object) return;
    if (list->magic == MAGIC_TENSORS || list->magic == MAGIC_SCALARS)
        for (int64_t i = 0; i < list->size; i++) sim_destroy(((void **)list->values)[i]);
    if (list->magic == MAGIC_TENSOR) free(((SimTensor *)object)->owned);
    free(object);
}

/* A list owns its members, as in the real library. */
#define DESTROY(function)                                                                                             \
    EXPORT int function(void *object)                                                                                 \
    {                                                                                                                 \
        sim_destroy(object);                                                                                              \
        return 0;                                                                                                     \
    }
DESTROY(aclDestroyTensor)
DESTROY(aclDestroyScalar)
DESTROY(aclDestroyIntArray)
DESTROY(aclDestroyBoolArray)
DESTROY(aclDestroyFloatArray)
DESTROY(aclDestroyTensorList)
DESTROY(aclDestroyScalarList)

void *sim_copy(const void *object)
{
    const SimList *list = object;
    if (!object) return NULL;
    size_t each = list->magic == MAGIC_FLOATS                                     ? 4
                  : list->magic == MAGIC_BOOLS || list->magic == MAGIC_BYTES ? 1
                                                                             : 8;
    size_t size = list->magic == MAGIC_TENSOR   ? sizeof(SimTensor)
                  : list->magic == MAGIC_SCALAR ? sizeof(SimScalar)
                                                : sizeof *list + list->size * each;
    SimList *made = malloc(size);
    memcpy(made, object, size);
    if (list->magic == MAGIC_TENSOR) {
        ((SimTensor *)made)->origin = (SimTensor *)object;
        ((SimTensor *)made)->owned = NULL;
    }
    if (list->magic == MAGIC_TENSORS || list->magic == MAGIC_SCALARS)
        for (int64_t i = 0; i < list->size; i++) ((void **)made->values)[i] = sim_copy(((void **)list->values)[i]);
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

/* ---- storage formats */
enum { ROWS = 16, ROW_BYTES = 32 };

/* What a cast to a format needs: matrices (M, N) become tiles (N / C, M / 16, 16, C), of 32 bytes a row of a tile.
 * Casts between others are refused, and torch_npu then asks for the operator Identity. */
EXPORT int aclnnNpuFormatCastCalculateSizeAndFormat(const SimTensor *tensor, int format, int type, int64_t **dims,
                                                    uint64_t *num_dims, int *actual)
{
    bool packs = format == ACL_FORMAT_FRACTAL_NZ && tensor->format != ACL_FORMAT_FRACTAL_NZ && tensor->num_dims >= 2;
    bool unpacks = tensor->format == ACL_FORMAT_FRACTAL_NZ && format <= ACL_FORMAT_ND;
    int count = tensor->num_dims;
    if (!packs && !unpacks) return ACL_ERROR_RT_PARAM_INVALID;
    int64_t *made = malloc((MAX_DIMS + 2) * sizeof *made), columns = ROW_BYTES / (int64_t)sim_size_of(type);
    memcpy(made, tensor->dims, count * sizeof *made);
    if (packs) {
        int64_t rows = made[count - 2], width = made[count - 1];
        made[count - 2] = (width + columns - 1) / columns;
        made[count - 1] = (rows + ROWS - 1) / ROWS;
        made[count++] = ROWS;
        made[count++] = columns;
    }
    *dims = made;
    *num_dims = count;
    *actual = format;
    return 0;
}
