// What the kernels of many rows share: memory that they work in, sums of outer products, and bringing rows into columns.

#pragma once

#include "vectors.h"

#include <memory>

namespace {

template <typename T>
struct Aligned {  // to cache lines, and not written yet
  std::unique_ptr<T[]> memory;
  explicit Aligned(int64_t count) : memory(new T[count + 64 / sizeof(T)]) {}
  T* get() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63}); }
};

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int SQUARE = 16;

// Pairs of rows, then of pairs, then of quarters change places, until each of 16 vectors is a column.
inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t width) {
  __m512 a[SQUARE], b[SQUARE];
  for (int i = 0; i < SQUARE; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
  for (int i = 0; i < SQUARE; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < SQUARE; i += 4)
    for (int half = 0; half < 2; ++half) {
      const __m512d low = _mm512_castps_pd(b[i + half]), high = _mm512_castps_pd(b[i + half + 2]);
      a[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  for (int i = 0; i < 4; ++i) {  // a[4 * n + i]: rows 4n to 4n + 3 of columns i, 4 + i, 8 + i and 12 + i
    const __m512 even_low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88), odd_low = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
    const __m512 even_high = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
    const __m512 odd_high = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
    _mm512_storeu_ps(to + i * width, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
    _mm512_storeu_ps(to + (4 + i) * width, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_ps(to + (8 + i) * width, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
    _mm512_storeu_ps(to + (12 + i) * width, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
  }
}
#elif defined(__SSE__)
constexpr int SQUARE = 4;

inline void transpose_square(const float* from, int64_t from_stride, float* to, int64_t width) {
  __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride);
  __m128 c = _mm_loadu_ps(from + 2 * from_stride), d = _mm_loadu_ps(from + 3 * from_stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + width, b);
  _mm_storeu_ps(to + 2 * width, c);
  _mm_storeu_ps(to + 3 * width, d);
}
#else
constexpr int SQUARE = 1;
inline void transpose_square(const float* from, int64_t, float* to, int64_t) { *to = *from; }
#endif

// to[i][row] = from[row][i]: `rows` rows into columns of a tile that is `width` wide.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t count, float* to, int64_t width) {
  const int64_t whole_rows = rows - rows % SQUARE, whole = count - count % SQUARE;
  for (int64_t i = 0; i < whole; i += SQUARE)
    for (int64_t row = 0; row < whole_rows; row += SQUARE)
      transpose_square(from + row * from_stride + i, from_stride, to + i * width + row, width);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = row < whole_rows ? whole : 0; i < count; ++i) to[i * width + row] = from[row * from_stride + i];
}

// acc[r][c] += a[r][i] * b[i][c] for i in 0..k. `later`: k vectors that are needed soon, fetched from memory on the way.
template <int R, int C>
[[gnu::always_inline]] inline void accumulate(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, Floats (&acc)[R][C],
                       const float* later = nullptr) {
  for (int64_t i = 0; i < k; ++i) {
    if (later) __builtin_prefetch(later + i * LANES);
    Floats values[C];
    for (int c = 0; c < C; ++c) values[c] = load(b + i * b_stride + c * LANES);
    for (int r = 0; r < R; ++r) {
      const Floats factor = splat(a[r * a_stride + i]);
      for (int c = 0; c < C; ++c) acc[r][c] += factor * values[c];
    }
  }
}

}  // namespace
