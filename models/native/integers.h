// Weights of few bits, and products of 16-bit integers, two at a time, summed in 32 bits. AVX-512 and AVX2 are named here, and give
// the same integers.

#pragma once

#include "vectors.h"

namespace {

constexpr int TILE = 16;   // outputs whose weights lie together
constexpr int GROUP = 32;  // elements of a row that share a scale
constexpr int PARTS = TILE / LANES;

struct Nibbles {  // a pair of 4-bit weights, none below zero; the low half comes first
  uint8_t both;
};

template <typename Weight>
constexpr int WEIGHTS_IN = 1;
template <>
constexpr int WEIGHTS_IN<Nibbles> = 2;

// dot: acc[lane] + a.low * w[2 * lane] + a.high * w[2 * lane + 1], the two 16-bit halves of `a` and pairs of weights.
// pairs: such weights from memory, of 4, 8 or 16 bits. put_rounded: to the nearest integers.
#if defined(__AVX512F__) && defined(__AVX512BW__)
typedef __m512i Sums;
typedef __m512i Pairs;
inline Pairs pairs(const int8_t* w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w))); }
inline Pairs pairs(const int16_t* w) { return _mm512_loadu_si512(w); }
inline Pairs pairs(const Nibbles* w) {
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return _mm512_and_si512(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), _mm512_set1_epi32(0x000f000f));
}
inline Sums dot(Sums acc, int32_t a, Pairs w) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(_mm512_set1_epi32(a)));  // of the intrinsic GCC spills the sums
  return acc;
#else
  return _mm512_add_epi32(acc, _mm512_madd_epi16(w, _mm512_set1_epi32(a)));
#endif
}
inline void put_rounded(int16_t* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(reinterpret_cast<__m512&>(x))));
}
#elif defined(__AVX2__)
typedef __m256i Sums;
typedef __m256i Pairs;
inline Pairs pairs(const int8_t* w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))); }
inline Pairs pairs(const int16_t* w) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)); }
inline Pairs pairs(const Nibbles* w) {
  const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w)));
  return _mm256_and_si256(_mm256_or_si256(both, _mm256_slli_epi32(both, 12)), _mm256_set1_epi32(0x000f000f));
}
inline Sums dot(Sums acc, int32_t a, Pairs w) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(w, _mm256_set1_epi32(a)));
}
inline void put_rounded(int16_t* to, Floats x) {
  const __m256i whole = _mm256_cvtps_epi32(reinterpret_cast<__m256&>(x));
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}
#else
struct Pairs { Ints even, odd; };
typedef Ints Sums;
template <typename T>
inline Pairs pairs(const T* w) {
  Pairs out;
  for (int lane = 0; lane < LANES; ++lane) out.even[lane] = w[2 * lane], out.odd[lane] = w[2 * lane + 1];
  return out;
}
inline Pairs pairs(const Nibbles* w) {
  Pairs out;
  for (int lane = 0; lane < LANES; ++lane) out.even[lane] = w[lane].both & 15, out.odd[lane] = w[lane].both >> 4;
  return out;
}
inline Sums dot(Sums acc, int32_t a, Pairs w) {
  return acc + w.even * static_cast<int32_t>(static_cast<int16_t>(a & 0xffff)) + w.odd * (a >> 16);
}
inline void put_rounded(int16_t* to, Floats x) {
  for (int lane = 0; lane < LANES; ++lane) to[lane] = static_cast<int16_t>(std::nearbyintf(x[lane]));
}
#endif

inline Floats floats(const Sums& acc) { return __builtin_convertvector(reinterpret_cast<const Ints&>(acc), Floats); }

inline int32_t pair_of(const int16_t* from) {
  int32_t both;
  std::memcpy(&both, from, sizeof both);
  return both;
}

}  // namespace
