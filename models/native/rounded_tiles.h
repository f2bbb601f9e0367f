// Tiles of keys and values in 16 bits, which processors multiply twice as fast as float32.
//
// A query and a key are rounded by their length, so that their product, a sum of DIM integers, fits 32 bits whatever they hold
// (Cauchy-Schwarz). A value is rounded by its largest number, and the scale goes into the weight that it is gathered by; weights
// are rounded by their sum, so that what they gather fits too. All scales belong to one token or one row: what a row gets does
// not depend on which rows or tokens share its tile.

#pragma once

#include "chunk.h"
#include "integers.h"

namespace {

template <int DIM>
class RoundedTiles {
 public:
  explicit RoundedTiles(int64_t rows)
      : queries_(rows * DIM), query_scales_(rows), keys_(DIM / 2 * KEYS), values_(KEYS * DIM), logits_(QUERIES * KEYS),
        weights_(QUERIES * KEYS) {
    std::fill_n(query_scales_.get(), rows, 0.0f);
  }

  void put_query(int64_t row, const float* from, float scale) {
    query_scales_.get()[row] = scale * round_by_length(from, queries_.get() + row * DIM);
  }

  // Token `at` of a tile has its keys and values at `from` and `values`; none when null.
  template <typename T>
  void put_token(int64_t at, const T* from, const T* values) {
    int16_t *key = key_rows_ + at * DIM, *value = value_rows_ + at * DIM;
    if (!from) {
      std::memset(key, 0, DIM * sizeof(int16_t));
      std::memset(value, 0, DIM * sizeof(int16_t));
      key_scales_[at] = value_scales_[at] = 0.0f;
      return;
    }
    key_scales_[at] = round_by_length(from, key);
    Floats most = {};
    for (int i = 0; i < DIM; i += LANES) most = larger(most, magnitude(load(values + i)));
    const float largest = largest_of(most), inverse = largest > TINY ? 32767.0f / largest : 0.0f;
    for (int i = 0; i < DIM; i += LANES) put_rounded(value + i, load(values + i) * inverse);
    value_scales_[at] = largest > TINY ? largest / 32767.0f : 0.0f;
  }

  void complete() {
    transpose(reinterpret_cast<const float*>(key_rows_), DIM / 2, KEYS, DIM / 2, keys_.get(), KEYS);  // by pairs of numbers
    for (int64_t at = 0; at < KEYS; at += 2)  // by pairs of tokens
      for (int i = 0; i < DIM; i += LANES) {
        const Halves *first = reinterpret_cast<const Halves*>(value_rows_ + at * DIM + i), *second = first + DIM / LANES;
        const Words both = __builtin_convertvector(*first, Words) | __builtin_convertvector(*second, Words) << 16;
        std::memcpy(values_.get() + at * DIM + 2 * i, &both, sizeof both);
      }
  }

  void attend(int64_t row, float cap, RowBlock& rows) {
    float* logits = logits_.get();
    for (int64_t at = 0; at < KEYS; at += BREADTH * LANES) {
      Sums acc[QUERIES][BREADTH] = {};
      multiply(queries_.get() + row * DIM, DIM, reinterpret_cast<const int16_t*>(keys_.get() + at), 2 * KEYS, DIM / 2, acc);
      for (int c = 0; c < BREADTH; ++c) {
        const Floats scale = load(key_scales_ + at + c * LANES);
        for (int r = 0; r < QUERIES; ++r) store(logits + r * KEYS + at + c * LANES, floats(acc[r][c]) * scale);
      }
    }
    weigh<DIM>(logits, query_scales_.get() + row, cap, rows);
    float scales[QUERIES];
    round_by_sum(logits, scales);
    gather<0>((rows.last() + 1) / 2, scales, rows.gathered);
  }

 private:
  static constexpr float LENGTH = 30000.0f, TINY = 1e-30f;

  // The scale that brings the rounded numbers back.
  template <typename T>
  static float round_by_length(const T* from, int16_t* to) {
    Floats squares = {};
    for (int i = 0; i < DIM; i += LANES) squares += load(from + i) * load(from + i);
    const float length = std::sqrt(sum(squares)), inverse = length > TINY ? LENGTH / length : 0.0f;
    for (int i = 0; i < DIM; i += LANES) put_rounded(to + i, load(from + i) * inverse);
    return length > TINY ? length / LENGTH : 0.0f;
  }

  // The rows' weights times the scales of the values that they are for, rounded; `scales` bring back the sums that they gather.
  void round_by_sum(float* weights, float* scales) {
    Floats totals[QUERIES] = {};
    for (int r = 0; r < QUERIES; ++r)
      for (int i = 0; i < KEYS; i += LANES) {
        const Floats scaled = load(weights + r * KEYS + i) * load(value_scales_ + i);
        store(weights + r * KEYS + i, scaled);
        totals[r] += scaled;
      }
    float all[QUERIES];
    for (int r = 0; r < QUERIES; ++r) all[r] = sum(totals[r]);
    for (int r = 0; r < QUERIES; ++r) {
      const float inverse = all[r] > TINY ? 32000.0f / all[r] : 0.0f;
      for (int i = 0; i < KEYS; i += LANES) put_rounded(weights_.get() + r * KEYS + i, load(weights + r * KEYS + i) * inverse);
      scales[r] = all[r] > TINY ? all[r] / 32000.0f : 0.0f;
    }
  }

  // acc[r][c] += pairs of a[r] times pairs of b, for `count` pairs.
  template <int C>
  [[gnu::always_inline]] static inline void multiply(const int16_t* a, int64_t a_stride, const int16_t* b, int64_t b_stride, int64_t count, Sums (&acc)[QUERIES][C]) {
    for (int64_t i = 0; i < count; ++i) {
      Pairs numbers[C];
      for (int c = 0; c < C; ++c) numbers[c] = pairs(b + i * b_stride + c * 2 * LANES);
      for (int r = 0; r < QUERIES; ++r) {
        const int32_t factors = pair_of(a + r * a_stride + 2 * i);
        for (int c = 0; c < C; ++c) acc[r][c] = dot(acc[r][c], factors, numbers[c]);
      }
    }
  }

  template <int AT>
  void gather(int64_t count, const float* scales, float* gathered) {
    constexpr int C = std::min(BREADTH, DIM / LANES - AT);
    Sums acc[QUERIES][C] = {};
    multiply(weights_.get(), KEYS, values_.get() + 2 * AT * LANES, 2 * DIM, count, acc);
    for (int r = 0; r < QUERIES; ++r)
      for (int c = 0; c < C; ++c) {
        float* to = gathered + r * DIM + (AT + c) * LANES;
        store(to, load(to) + floats(acc[r][c]) * scales[r]);
      }
    if constexpr ((AT + C) * LANES < DIM) gather<AT + C>(count, scales, gathered);
  }

  Aligned<int16_t> queries_;      // [rows][DIM]
  Aligned<float> query_scales_;   // [rows]
  Aligned<float> keys_;           // [DIM / 2][KEYS] pairs
  Aligned<int16_t> values_;       // [KEYS / 2][DIM] pairs
  Aligned<float> logits_;         // [QUERIES][KEYS]
  Aligned<int16_t> weights_;      // [QUERIES][KEYS]
  alignas(64) int16_t key_rows_[KEYS * DIM], value_rows_[KEYS * DIM];  // as they came
  alignas(64) float key_scales_[KEYS], value_scales_[KEYS];
};

}  // namespace
