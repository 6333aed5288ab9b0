// Conversions and packed arithmetic of hopper_on_cpu.h, bit for bit as the PTX manual defines them.
#pragma once
#include "byte_perm.h"
#include "number_formats.h"

inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float ex2_approx(float x) { return std::exp2(x); }

// e4m3 -------------------------------------------------------------------------------------------

inline uint16_t cvt_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
    return cvt_e4m3x2(x0, x1) | static_cast<uint32_t>(cvt_e4m3x2(x2, x3)) << 16;
}

// f16 --------------------------------------------------------------------------------------------

/// `of` for the low halves and for the high ones.
template <typename Of> uint32_t by_halves(uint32_t a, uint32_t b, uint32_t c, Of of) {
    return of(a & 0xffff, b & 0xffff, c & 0xffff) | static_cast<uint32_t>(of(a >> 16, b >> 16, c >> 16)) << 16;
}
inline uint32_t fma_relu_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return by_halves(a, b, c, [](uint16_t x, uint16_t y, uint16_t z) -> uint16_t {
        const uint16_t sum = to_f16(static_cast<double>(from_f16(x)) * from_f16(y) + from_f16(z));
        return sum & 0x8000 ? 0 : sum;  // NaN is positive
    });
}
inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
    return by_halves(a, b, 0, [](uint16_t x, uint16_t y, uint16_t) {
        return to_f16(static_cast<double>(from_f16(x)) + from_f16(y));
    });
}
inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
    return by_halves(a, b, 0, [](uint16_t x, uint16_t y, uint16_t) {
        return to_f16(std::fmax(from_f16(x), from_f16(y)));
    });
}
inline uint32_t min_nan_f16x2(uint32_t a, uint32_t b) {
    return by_halves(a, b, 0, [](uint16_t x, uint16_t y, uint16_t) {
        const float p = from_f16(x), q = from_f16(y);
        return std::isnan(p) || std::isnan(q) ? F16_NAN : to_f16(std::min(p, q));
    });
}
inline uint32_t cvt_f16x2(float low, float high) { return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16; }
inline float cvt_f32_f16(uint16_t half) { return from_f16(half); }
inline uint32_t cvt_f16x2_e4m3x2(uint16_t packed) {
    return cvt_f16x2(from_e4m3(packed & 0xff), from_e4m3(packed >> 8));
}

// bf16 -------------------------------------------------------------------------------------------

inline uint32_t to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t cvt_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) {
    return by_halves(a, b, 0, [](uint32_t p, uint32_t q, uint32_t) {
        const float x = __uint_as_float(p << 16), y = __uint_as_float(q << 16);
        return static_cast<uint16_t>(std::isnan(x) || std::isnan(y) ? 0x7fff : x > y ? p : q);
    });
}

// Integers ---------------------------------------------------------------------------------------

inline uint32_t max_s16x2(uint32_t a, uint32_t b) {
    return by_halves(a, b, 0, [](uint16_t x, uint16_t y, uint16_t) -> uint16_t {
        return std::max(static_cast<int16_t>(x), static_cast<int16_t>(y));
    });
}
