// Vectors of float32 in the compiler's own type, as wide as the processor's, and what the kernels compute with them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int LANES = 16;
constexpr bool MANY_REGISTERS = true;  // for vectors: 32, else 16
#else
constexpr int LANES = 8;
constexpr bool MANY_REGISTERS = false;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Floats splat(float value) { return value - Floats{}; }  // minus zero costs nothing; plus zero is an addition
inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }

inline Floats load(const uint16_t* from) {  // bfloat16
  Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
  Floats value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Halves onto each other until one number is left.
inline float sum(Floats value) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m256 halves[2];
  std::memcpy(halves, &value, sizeof value);
  const __m256 eight = _mm256_add_ps(halves[0], halves[1]);
#elif defined(__AVX2__)
  const __m256 eight = reinterpret_cast<__m256&>(value);
#endif
#if defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) value[lane] += value[lane + width];
  return value[0];
#endif
}

// totals[i] = sum(values[i]), to the same bits; sixteen at a time go onto each other together.
template <int COUNT>
[[gnu::always_inline]] inline void sum_each(const Floats* values, float* totals) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if constexpr (COUNT == 16) {
    const auto at = [&](int i) { return reinterpret_cast<const __m512&>(values[i]); };
    __m512 fours[4], twos[2];
    for (int i = 0; i < 4; ++i) {
      __m512 eights[2];
      for (int half = 0; half < 2; ++half) {
        const __m512 a = at(4 * i + 2 * half), b = at(4 * i + 2 * half + 1);
        eights[half] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
      }
      const __m512 low = _mm512_shuffle_f32x4(eights[0], eights[1], 0x88), high = _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd);
      fours[i] = _mm512_add_ps(low, high);
    }
    for (int i = 0; i < 2; ++i) {
      const __m512d a = _mm512_castps_pd(fours[2 * i]), b = _mm512_castps_pd(fours[2 * i + 1]);
      twos[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    float found[16];
    _mm512_storeu_ps(found, _mm512_add_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x88), _mm512_shuffle_ps(twos[0], twos[1], 0xdd)));
    for (int i = 0; i < 16; ++i) totals[i] = found[i % 4 * 4 + i / 4];
    return;
  }
#endif
  for (int i = 0; i < COUNT; ++i) totals[i] = sum(values[i]);
}

inline float largest_of(Floats value) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512&>(value));
#else
  for (int width = LANES / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) value[lane] = std::max<float>(value[lane], value[lane + width]);
  return value[0];
#endif
}

inline Floats magnitude(Floats x) {
  Words bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7fffffffu;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// The first `count` of a row's numbers, or all, and what is added to them (null: nothing).
inline void put_outputs(float* to, Floats numbers, const float* bias, int64_t count) {
  if (count >= LANES) return store(to, bias ? numbers + load(bias) : numbers);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = numbers[lane] + (bias ? bias[lane] : 0.0f);
}

inline void put(float* to, float value) { *to = value; }
inline void put(uint16_t* to, float value) { *to = to_bfloat16(value); }

// e^x for x <= 0, to about one part in 10^7: 2^n times a polynomial on [-ln2/2, ln2/2].
inline Floats exponential(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 bounded = _mm512_max_ps(reinterpret_cast<__m512&>(x), _mm512_set1_ps(-87.0f));
  const __m512 turns = _mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504088896341f));
  const __m512 whole = _mm512_roundscale_ps(turns, 0);
  const Floats n = reinterpret_cast<const Floats&>(whole);
  x = reinterpret_cast<const Floats&>(bounded);
#else
  x = x < -87.0f ? splat(-87.0f) : x;
  Floats turns = x * 1.44269504088896341f - 0.5f;
  Ints whole = __builtin_convertvector(turns, Ints);  // towards zero, which is rounding to nearest here
  Floats n = __builtin_convertvector(whole, Floats);
#endif
  Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 scaled = _mm512_scalef_ps(reinterpret_cast<__m512&>(p), whole);
  return reinterpret_cast<const Floats&>(scaled);
#else
  Ints power = (whole + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
#endif
}

}  // namespace
