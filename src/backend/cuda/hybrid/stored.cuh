/* stored.cuh - quantized salient tokens (ops/salient.h has the layout and the rounding):
 * reading, rounding and writing them. Heads are whole groups of 32 numbers here.
 *
 * A unit is eight numbers, a quarter of a group; a group is four units in four lanes
 * side by side. Bits say what is stored: 8 and 5 are keys, 4 and 3 values. */
#ifndef STI_BACKEND_CUDA_HYBRID_STORED_CUH
#define STI_BACKEND_CUDA_HYBRID_STORED_CUH

#include "backend/cuda/hybrid/params.h"
#include "backend/cuda/ptx/half.cuh"
#include "backend/cuda/ptx/memory.cuh"

/* Keys, or values, of quantized tokens; slots one behind the other. */
typedef struct stored_rows {
    int bits, groups; /* of a row */
    uint8_t *low, *high;
    uint16_t *scale;

    __device__ __forceinline__ int width() const /* bits in `low` */
    {
        return bits & ~1;
    }
    __device__ __forceinline__ bool values() const
    {
        return bits < 5;
    }
    /* The same from `slot` on. */
    __device__ __forceinline__ stored_rows from(size_t slot) const
    {
        const size_t at = slot * groups;
        return {bits, groups, low + at * width() * 4, high ? high + at * 4 : NULL,
                scale + at * (values() ? 2 : 1)};
    }
} stored_rows;

STI_DEVICE stored_rows stored_keys(const sti_cuda_hybrid_params &h,
                                   const sti_cuda_hybrid_session &s)
{
    return {h.key_bits, h.D / 32, static_cast<uint8_t *>(s.sal_k), s.sal_k_high,
            s.sal_k_scale};
}
STI_DEVICE stored_rows stored_values(const sti_cuda_hybrid_params &h,
                                     const sti_cuda_hybrid_session &s)
{
    return {h.value_bits, h.D / 32, static_cast<uint8_t *>(s.sal_v), s.sal_v_high,
            s.sal_v_scale};
}

/* ---- Levels -------------------------------------------------------------- */

/* d u + m: what a level stands for. Keys have no m, and their levels a sign. */
typedef struct stored_scale {
    float d, m;
} stored_scale;

STI_DEVICE float half_bits(uint16_t x)
{
    return __half2float(__ushort_as_half(x));
}
STI_DEVICE stored_scale scale_of(const stored_rows &r, size_t group)
{
    if (!r.values()) return {half_bits(r.scale[group]), 0};
    const float2 both =
        unpack_half2(reinterpret_cast<const uint32_t *>(r.scale)[group]);
    return {both.x, both.y};
}
/* Of the first slot. */
STI_DEVICE void prefetch_stored(const stored_rows &r)
{
    prefetch_l2(r.low);
    prefetch_l2(r.scale);
    if (r.high) prefetch_l2(r.high);
}

/* The level with these bits, before its sign. */
STI_DEVICE float level_value(int bits, uint32_t level, stored_scale s)
{
    const int u = bits == 8   ? (int)(int8_t)level
                  : bits == 5 ? (int)level - 16
                              : (int)level;
    return fmaf(s.d, (float)u, s.m);
}

/* Where the levels of unit u of a group lie: eight bytes of `low`, a level in each. */
STI_DEVICE int unit_offset(int width, int u)
{
    return width == 8 ? 8 * u : width == 4 ? 8 * (u & 1) : 0;
}
STI_DEVICE int unit_shift(int width, int u)
{
    return width == 8 ? 0 : width == 4 ? 4 * (u >> 1) : 2 * u;
}

/* x [8]: unit `unit` of a slot. */
STI_DEVICE void load_unit(const stored_rows &r, size_t slot, int unit, float *x)
{
    const int width = r.width(), u = unit % 4, shift = unit_shift(width, u);
    const size_t group = slot * r.groups + unit / 4;
    const uint2 two = *reinterpret_cast<const uint2 *>(r.low + group * width * 4 +
                                                       unit_offset(width, u));
    const uint32_t high = r.high ? r.high[group * 4 + u] : 0, mask = (1u << width) - 1;
    const stored_scale s = scale_of(r, group);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t byte = (i < 4 ? two.x : two.y) >> (8 * (i & 3) + shift);
        x[i] = level_value(r.bits, (byte & mask) | (high >> i & 1) << width, s);
    }
}

/* Number e of a slot. */
STI_DEVICE float load_stored(const stored_rows &r, size_t slot, int e)
{
    const int width = r.width(), u = e / 8 % 4, i = e % 8;
    const size_t group = slot * r.groups + e / 32;
    const uint32_t byte = r.low[group * width * 4 + unit_offset(width, u) + i];
    const uint32_t high = r.high ? r.high[group * 4 + u] : 0, mask = (1u << width) - 1;
    return level_value(r.bits,
                       (byte >> unit_shift(width, u) & mask) | (high >> i & 1) << width,
                       scale_of(r, group));
}

/* ---- Several levels at once ---------------------------------------------- */

/* Two halves are a word here. A byte b below one with 0x64 is the half 1024 + b. */
STI_DEVICE uint32_t halves_minus(uint32_t x, uint32_t y)
{
    return half2_bits(__hsub2(bits_half2(x), bits_half2(y)));
}
STI_DEVICE uint32_t halves_fma(uint32_t x, uint32_t y, uint32_t z)
{
    return half2_bits(__hfma2(bits_half2(x), bits_half2(y), bits_half2(z)));
}

/* Four bits, the lowest of x, each to bit TO of a byte. */
template <int TO> STI_DEVICE uint32_t spread_bits(uint32_t x)
{
    static_assert(TO <= 7, "of a byte");
    return (x & 0xf) * (0x00204081u << TO) & 0x01010101u << TO;
}

/* Eight key levels, signed, as halves. 8 bits: level [2] has eight of them in order. 5:
 * [0] has numbers 4 t .. of the group in its lower nibbles and 16 + 4 t .. in the upper
 * ones, [1] the fifth bits of the whole group. */
template <int BITS>
STI_DEVICE void key_halves(const uint32_t (&level)[2], int t, uint32_t (&to)[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t bytes = BITS == 8
                                   ? level[i] ^ 0x80808080u
                                   : (level[0] >> 4 * i & 0x0f0f0f0fu) |
                                         spread_bits<4>(level[1] >> (16 * i + 4 * t));
        const uint32_t zero =
            BITS == 8 ? 0x64806480u : 0x64106410u; /* 1024 + level 0 */
        to[2 * i] = halves_minus(__byte_perm(bytes, 0x64646464u, 0x4140), zero);
        to[2 * i + 1] = halves_minus(__byte_perm(bytes, 0x64646464u, 0x4342), zero);
    }
}

/* Eight value levels of a group, a nibble each, from a lane's word w, 0 <= w < 4. 4 bits:
 * word w of the group. 3: byte b of word w / 2 and four more bits of it, so that nibble s
 * of byte b is number 4 (w / 2) + 16 (w % 2) + b + 8 s; high: the third bits of the whole
 * group. */
template <int BITS>
STI_DEVICE uint32_t value_nibbles(uint32_t low, uint32_t high, int w)
{
    if (BITS == 4) return low;
    const uint32_t two = low >> 4 * (w % 2),
                   third = high >> (4 * (w / 2) + 16 * (w % 2));
    return (two & 0x03030303u) | (two & 0x0c0c0c0cu) << 2 | spread_bits<2>(third) |
           spread_bits<6>(third >> 8);
}

/* The lower and the upper nibble of byte b of x and of y, as the halves d u + m. */
STI_DEVICE void value_halves(uint32_t x, uint32_t y, int b, uint32_t d, uint32_t m,
                             uint32_t *lower, uint32_t *upper)
{
    const uint32_t both = __byte_perm(x, y, (uint32_t)(0x4400 + 0x1111 * b));
    const uint32_t one = and_or<0x000f000fu, 0x64006400u>(both),
                   two = and_or<0x00f000f0u, 0x64006400u>(both); /* 1024 + 16 u */
    *lower = halves_fma(halves_minus(one, 0x64006400u), d, m);
    *upper = halves_fma(halves_fma(two, 0x2c002c00u, 0xd400d400u), d, m);
}

/* ---- Rounding ------------------------------------------------------------ */

/* A unit as levels, and the scales of its group as they are stored. */
typedef struct rounded_unit {
    int bits;
    uint32_t level[8];
    uint16_t d, m;

    __device__ __forceinline__ float at(int i) const
    {
        return level_value(bits, level[i], {half_bits(d), half_bits(m)});
    }
} rounded_unit;

/* The lanes that have the other units of this one's group. */
STI_DEVICE unsigned group_lanes()
{
    return 0xfu << (threadIdx.x % 32 & ~3u);
}
STI_DEVICE float group_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(group_lanes(), x, 1));
    return fmaxf(x, __shfl_xor_sync(group_lanes(), x, 2));
}

/* The integer next to v, half to even, within [lo, hi]; lo if v is no number. */
STI_DEVICE int nearest(float v, int lo, int hi)
{
    if (!(v > (float)lo)) return lo;
    return v < (float)hi ? __float2int_rn(v) : hi;
}

/* Rounds x [8]; the four lanes of a group call it together. */
STI_DEVICE rounded_unit round_unit(int bits, const float *x)
{
    rounded_unit r;
    r.bits = bits;
    const bool keys = bits >= 5;
    float most = keys ? 0 : -INFINITY, least = -INFINITY; /* least: negated */
#pragma unroll
    for (int i = 0; i < 8; i++) {
        most = fmaxf(most, keys ? fabsf(x[i]) : x[i]);
        least = fmaxf(least, -x[i]);
    }
    most = group_max(most);
    least = -group_max(least);
    const int top = keys ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
    r.d = __half_as_ushort(
        __float2half_rn(__fdiv_rn(keys ? most : most - least, (float)top)));
    r.m = keys ? 0 : __half_as_ushort(__float2half_rn(least));
    const float d = half_bits(r.d), m = half_bits(r.m);
    const float per = d > 0 ? __fdiv_rn(1, d) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float v = __fmul_rn(__fsub_rn(x[i], m), per);
        int level = nearest(v, keys ? -top : 0, top);
        if (bits == 5) level += 16;
        r.level[i] = (uint32_t)level & (bits == 8 ? 0xffu : ~0u);
    }
    return r;
}

/* Writes what the four lanes of a group have rounded. */
STI_DEVICE void store_unit(const stored_rows &to, size_t slot, int unit,
                           const rounded_unit &r)
{
    const int width = to.width(), u = unit % 4, shift = unit_shift(width, u);
    const size_t group = slot * to.groups + unit / 4;
    const uint32_t mask = (1u << width) - 1;
    uint2 two = make_uint2(0, 0);
    uint32_t high = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t bits = (r.level[i] & mask) << (8 * (i & 3) + shift);
        if (i < 4)
            two.x |= bits;
        else
            two.y |= bits;
        high |= (r.level[i] >> width & 1) << i;
    }
    /* units that share bytes */
    if (width < 8) {
        two.x |= __shfl_xor_sync(group_lanes(), two.x, 2);
        two.y |= __shfl_xor_sync(group_lanes(), two.y, 2);
    }
    if (width < 4) {
        two.x |= __shfl_xor_sync(group_lanes(), two.x, 1);
        two.y |= __shfl_xor_sync(group_lanes(), two.y, 1);
    }
    if (u < width / 2)
        *reinterpret_cast<uint2 *>(to.low + group * width * 4 + unit_offset(width, u)) =
            two;
    if (to.high) to.high[group * 4 + u] = (uint8_t)high;
    if (u > 0) return;
    if (to.values())
        reinterpret_cast<uint32_t *>(to.scale)[group] = (uint32_t)r.d | (uint32_t)r.m
                                                                            << 16;
    else
        to.scale[group] = r.d;
}

/* A lane's part of a copy of a slot. */
STI_DEVICE void copy_unit(const stored_rows &to, size_t slot, const stored_rows &from,
                          size_t from_slot, int unit)
{
    const int width = to.width(), u = unit % 4;
    const size_t a = slot * to.groups + unit / 4, b = from_slot * to.groups + unit / 4;
    const int at = unit_offset(width, u);
    if (u < width / 2)
        *reinterpret_cast<uint2 *>(to.low + a * width * 4 + at) =
            *reinterpret_cast<const uint2 *>(from.low + b * width * 4 + at);
    if (to.high) to.high[a * 4 + u] = from.high[b * 4 + u];
    if (u > 0) return;
    if (to.values())
        reinterpret_cast<uint32_t *>(to.scale)[a] =
            reinterpret_cast<const uint32_t *>(from.scale)[b];
    else
        to.scale[a] = from.scale[b];
}

#endif
