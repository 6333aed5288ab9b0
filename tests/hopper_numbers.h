// Conversions and packed arithmetic of hopper_on_cpu.h, bit for bit as the PTX manual defines them.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

template <typename To, typename From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float ex2_approx(float x) { return std::exp2(x); }

// e4m3 -------------------------------------------------------------------------------------------

inline float from_e4m3(uint8_t bits) {
    static const auto table = [] {
        std::array<float, 256> numbers;
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            const float size = exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
            numbers[code] = (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
        }
        return numbers;
    }();
    return table[bits];
}
inline uint8_t to_e4m3(float x) {
    if (std::isnan(x)) return 0x7f;
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    const float size = std::min(std::fabs(x), 448.0f);
    int exponent = size ? std::max(std::ilogb(size), -6) : -6;
    const float units = std::nearbyint(std::ldexp(size, 3 - exponent));  // ties to even
    const int code = units >= 8 ? (exponent + 7) * 8 + static_cast<int>(units) - 8 : static_cast<int>(units);
    return sign | std::min(code, 0x7e);
}
inline uint16_t cvt_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline uint32_t cvt_e4m3x4(float x0, float x1, float x2, float x3) {
    return cvt_e4m3x2(x0, x1) | static_cast<uint32_t>(cvt_e4m3x2(x2, x3)) << 16;
}

// f16 --------------------------------------------------------------------------------------------

constexpr uint16_t F16_NAN = 0x7fff, F16_INFINITY = 0x7c00;

inline float from_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                      : std::ldexp(float(fraction), -24);
    return bits & 0x8000 ? -size : size;
}
/// From f64, which holds every sum and product of f16 exactly enough to round once.
inline uint16_t to_f16(double x) {
    if (std::isnan(x)) return F16_NAN;
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::fabs(x);
    if (size >= 65520) return sign | F16_INFINITY;
    const int exponent = size ? std::max(std::ilogb(size), -14) : -14;
    const int units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // ties to even
    return sign | ((exponent + 14) * 1024 + units);
}
/// `of` for the low halves and for the high ones.
template <typename Of> uint32_t by_halves(uint32_t a, uint32_t b, uint32_t c, Of of) {
    return of(a & 0xffff, b & 0xffff, c & 0xffff) | static_cast<uint32_t>(of(a >> 16, b >> 16, c >> 16)) << 16;
}
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    return by_halves(a, b, c, [](uint16_t x, uint16_t y, uint16_t z) {
        return to_f16(static_cast<double>(from_f16(x)) * from_f16(y) + from_f16(z));
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
inline uint32_t max_nan_f16x2(uint32_t a, uint32_t b) {
    return by_halves(a, b, 0, [](uint16_t x, uint16_t y, uint16_t) {
        const float p = from_f16(x), q = from_f16(y);
        return std::isnan(p) || std::isnan(q) ? F16_NAN : to_f16(std::max(p, q));
    });
}
inline uint32_t cvt_f16x2(float low, float high) { return to_f16(low) | static_cast<uint32_t>(to_f16(high)) << 16; }
inline float cvt_f32_f16(uint16_t half) { return from_f16(half); }
inline uint32_t cvt_f16x2_e4m3x2(uint16_t packed) {
    return cvt_f16x2(from_e4m3(packed & 0xff), from_e4m3(packed >> 8));
}
inline uint16_t cvt_e4m3x2_f16x2(uint32_t halves) { return cvt_e4m3x2(from_f16(halves), from_f16(halves >> 16)); }

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
