// CUDA's __byte_perm, for both emulations.
#pragma once
#include <cstdint>

/// Byte i of the result is the byte of {b, a} that nibble i of the selector names by its low three bits.
/// NOTE: PTX's PRMT replicates the sign bit where bit 3 of the nibble is set; CUDA's __byte_perm clears that bit.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
