// Weights as files of few bits hold them, and the very floats that they stand for: the integer times its scale, plus the least
// weight of its group where there is one. Scales come from 16 bits, so the product is exact, and the sum is rounded once.

#pragma once

#include "integers.h"

#include <type_traits>

namespace {

// A tile is [groups][16 pairs of inputs][16 outputs][2]; its scales, and least weights (null: none), [groups][16].
template <typename Weight>
struct Stored {
  const Weight* packed;
  const float *scales, *least;
  int64_t groups;

  static constexpr int64_t GROUP_SIZE = TILE * GROUP / WEIGHTS_IN<Weight>;

  const Weight* group(int64_t tile, int64_t at) const { return packed + (tile * groups + at) * GROUP_SIZE; }
  Floats scale(int64_t tile, int64_t at, int part) const { return load(scales + (tile * groups + at) * TILE + part * LANES); }
  Floats least_of(int64_t tile, int64_t at, int part) const {
    return least ? load(least + (tile * groups + at) * TILE + part * LANES) : Floats{};
  }
};

// LANES pairs of weights, each in the low bits of a lane, the second above the first.
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline Ints in_lanes(const Nibbles* from) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<const Ints&>(wide);
}
inline Ints in_lanes(const int8_t* from) {
  const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<const Ints&>(wide);
}
#elif defined(__AVX2__)
inline Ints in_lanes(const Nibbles* from) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<const Ints&>(wide);
}
inline Ints in_lanes(const int8_t* from) {
  const __m256i wide = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return reinterpret_cast<const Ints&>(wide);
}
#else
inline Ints in_lanes(const Nibbles* from) {
  Ints wide;
  for (int lane = 0; lane < LANES; ++lane) wide[lane] = from[lane].both;
  return wide;
}
inline Ints in_lanes(const int8_t* from) {
  Ints wide;
  for (int lane = 0; lane < LANES; ++lane) wide[lane] = static_cast<uint8_t>(from[2 * lane]) | from[2 * lane + 1] * 256;
  return wide;
}
#endif

inline void integers(const Nibbles* from, Floats (&two)[2]) {
  const Ints both = in_lanes(from);
  two[0] = __builtin_convertvector(both & 15, Floats);
  two[1] = __builtin_convertvector(both >> 4, Floats);
}

inline void integers(const int8_t* from, Floats (&two)[2]) {
  const Ints both = in_lanes(from);
  two[0] = __builtin_convertvector((both << 24) >> 24, Floats);
  two[1] = __builtin_convertvector(both >> 8, Floats);
}

// The weights of LANES outputs from `part * LANES` of a tile on, for a pair of inputs of a group.
template <typename Weight>
[[gnu::always_inline]] inline void weights_of(const Weight* group, int pair, int part, Floats scale, Floats least, Floats (&two)[2]) {
  integers(group + (pair * TILE + part * LANES) * 2 / WEIGHTS_IN<Weight>, two);
  for (Floats& weight : two) weight = std::is_same_v<Weight, Nibbles> ? weight * scale + least : weight * scale;
}

}  // namespace
