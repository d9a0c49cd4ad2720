/* Sums, products and extremes over ranks, in the order of ranks; of half precision in fp32, rounded once. */
#include "sim_hccl.h"

size_t sim_hccl_size(HcclDataType type)
{
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_UINT8: return 1;
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_UINT16:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_BFP16: return 2;
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_UINT32:
        case HCCL_DATA_TYPE_FP32: return 4;
        case HCCL_DATA_TYPE_INT64:
        case HCCL_DATA_TYPE_UINT64:
        case HCCL_DATA_TYPE_FP64: return 8;
        default: return 0;
    }
}

/* The types that the header of HCCL lists for reductions. */
bool sim_hccl_reduces(HcclDataType type, HcclReduceOp op)
{
    bool known = op == HCCL_REDUCE_SUM || op == HCCL_REDUCE_PROD || op == HCCL_REDUCE_MAX || op == HCCL_REDUCE_MIN;
    switch (type) {
        case HCCL_DATA_TYPE_INT8:
        case HCCL_DATA_TYPE_INT16:
        case HCCL_DATA_TYPE_INT32:
        case HCCL_DATA_TYPE_INT64:
        case HCCL_DATA_TYPE_FP16:
        case HCCL_DATA_TYPE_FP32:
        case HCCL_DATA_TYPE_BFP16: return known;
        default: return false;
    }
}

/* ---- half precision */
static float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_bfloat(uint16_t half)
{
    return of_bits((uint32_t)half << 16);
}

static uint16_t to_bfloat(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);  /* a NaN stays one */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
    if (exponent == 0x1f) return of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent) return of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

static uint16_t to_half(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  /* 65520 and more round to infinity */
    if (rest < 0x38800000)  /* below 2^-14: 0.5 has the spacing of these, 2^-24 */
        return (uint16_t)(sign | (bits_of(of_bits(rest) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1)) >> 13) - (112 << 10));
}

static float plain(float value)
{
    return value;
}

/* ---- one loop for floating types and one for integers: what is read, accumulated and written differs */
#define COMBINE(a, b) (op == HCCL_REDUCE_SUM    ? (a) + (b)                                                           \
                       : op == HCCL_REDUCE_PROD ? (a) * (b)                                                           \
                       : op == HCCL_REDUCE_MAX  ? ((b) > (a) || (b) != (b) ? (b) : (a))                               \
                                                : ((b) < (a) || (b) != (b) ? (b) : (a)))
#define REDUCE(stored, wide, read, write)                                                                             \
    do {                                                                                                              \
        for (uint64_t i = 0; i < count; i++) {                                                                        \
            wide total = read(((const stored *)from[0])[i]);                                                          \
            for (uint32_t rank = 1; rank < num; rank++) {                                                             \
                wide other = read(((const stored *)from[rank])[i]);                                                   \
                total = (wide)COMBINE(total, other);                                                                  \
            }                                                                                                         \
            ((stored *)into)[i] = (stored)write(total);                                                               \
        }                                                                                                             \
    } while (0)

void sim_hccl_reduce(void *into, const void *const *from, uint32_t num, uint64_t count, HcclDataType type,
                     HcclReduceOp op)
{
    switch (type) {
        case HCCL_DATA_TYPE_FP32: REDUCE(float, float, plain, plain); break;
        case HCCL_DATA_TYPE_BFP16: REDUCE(uint16_t, float, from_bfloat, to_bfloat); break;
        case HCCL_DATA_TYPE_FP16: REDUCE(uint16_t, float, from_half, to_half); break;
        case HCCL_DATA_TYPE_INT8: REDUCE(int8_t, __int128, , ); break;
        case HCCL_DATA_TYPE_INT16: REDUCE(int16_t, __int128, , ); break;
        case HCCL_DATA_TYPE_INT32: REDUCE(int32_t, __int128, , ); break;
        case HCCL_DATA_TYPE_INT64: REDUCE(int64_t, __int128, , ); break;
        default: break;
    }
}
