// Numbers of 8 and 16 bits, for both emulations: what their bits mean, and the nearest to a number.
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

// f16 --------------------------------------------------------------------------------------------

constexpr uint16_t F16_NAN = 0x7fff, F16_INFINITY = 0x7c00;

inline float from_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY) : bits_as<float>((bits & 0x7fff) << 13) * 0x1p112f;
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
