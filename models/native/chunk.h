// What a prefill chunk's attention goes by, whatever numbers its tiles are kept in: who sees what, and the softmax as it goes.

#pragma once

#include "tiles.h"

namespace {

constexpr int QUERIES = 6, BREADTH = MANY_REGISTERS ? 4 : 2;  // rows and vectors that are accumulated in registers
constexpr int64_t KEYS = 64;  // tokens of a tile of keys and values; tiles begin at multiples of it

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
constexpr float LOG2_E = 1.44269504088896341f;

// The new tokens of one sequence, the last `m` of `total`. A token sees `window` tokens back, itself among them, from `first` on.
struct Chunk {
  const void* cache;
  bool bfloat16;
  const int64_t* table;
  int64_t block_tokens, m, total, first, window, heads, kv_heads;
  float scale, cap;  // cap 0: none
};

// 2^x for x <= 0, to about two parts in 10^7: logits come scaled for it.
inline Floats power_of_two(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 bounded = _mm512_max_ps(reinterpret_cast<__m512&>(x), _mm512_set1_ps(-126.0f));
  const __m512 whole = _mm512_roundscale_ps(bounded, 0);
  const Floats r = reinterpret_cast<const Floats&>(bounded) - reinterpret_cast<const Floats&>(whole);
#else
  x = x < -126.0f ? splat(-126.0f) : x;
  const Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // towards zero, which is rounding to nearest here
  const Floats r = x - __builtin_convertvector(whole, Floats);
#endif
  Floats p = splat(1.3390863e-3f);  // least error on [-1/2, 1/2]
  p = p * r + 9.6760319e-3f;
  p = p * r + 5.5503571e-2f;
  p = p * r + 2.4022107e-1f;
  p = p * r + 6.9314719e-1f;
  p = p * r + 1.0f;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 scaled = _mm512_scalef_ps(reinterpret_cast<__m512&>(p), whole);
  return reinterpret_cast<const Floats&>(scaled);
#else
  const Ints power = (whole + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return p * scale;
#endif
}

inline Floats capped(Floats logits, float cap) {  // tanh(logits / cap) * cap
  const Floats x = logits * (1.0f / cap), magnitude = x < 0.0f ? -x : x;
  const Floats shrunk = exponential(magnitude * -2.0f), squeezed = (1.0f - shrunk) / (1.0f + shrunk) * cap;
  return x < 0.0f ? -squeezed : squeezed;
}

// Some rows of a task (a row: a query head of a token), what they have gathered so far, and what each sees of a tile.
struct RowBlock {
  float* gathered;                   // [QUERIES][DIM]
  float* largest;                    // [QUERIES]
  float* totals;                     // [QUERIES][LANES], lanes still apart
  int begin[QUERIES], end[QUERIES];

  bool sees(int r) const { return begin[r] < end[r]; }
  int last() const {
    int last = 0;
    for (int r = 0; r < QUERIES; ++r) last = sees(r) ? std::max(last, end[r]) : last;
    return last;
  }
};

// Numbers of a tile's row for tokens outside begin..end become `value`.
inline void hide(float* row, int begin, int end, float value) {
  for (int i = 0; i < KEYS; i += LANES) {
    const Ints token = LANE + i;
    store(row + i, (token >= begin) & (token < end) ? load(row + i) : splat(value));
  }
}

// The rows' logits over a tile, times `factors`, become weights relative to each row's largest so far; what was gathered before
// follows suit. Step by step for all rows, so that none waits for its own sums.
template <int DIM>
void weigh(float* logits, const float* factors, float cap, RowBlock& rows) {
  const auto cut = [&](int r) { return rows.begin[r] > 0 || rows.end[r] < KEYS; };
  float factor[QUERIES], largest[QUERIES];
  for (int r = 0; r < QUERIES; ++r) {
    float* row = logits + r * KEYS;
    factor[r] = cap > 0.0f ? 1.0f : factors[r];
    for (int i = 0; cap > 0.0f && i < KEYS; i += LANES) store(row + i, capped(load(row + i) * factors[r], cap) * LOG2_E);
    if (cut(r)) hide(row, rows.begin[r], rows.end[r], -INFINITY);
  }
  for (int r = 0; r < QUERIES; ++r) {
    Floats most = load(logits + r * KEYS);
    for (int i = LANES; i < KEYS; i += LANES) most = larger(load(logits + r * KEYS + i), most);
    largest[r] = largest_of(most);
  }
  for (int r = 0; r < QUERIES; ++r) {
    const float before = rows.largest[r];
    if (!(largest[r] * factor[r] > before)) continue;
    rows.largest[r] = largest[r] * factor[r];
    const float shrunk = before == -INFINITY ? 0.0f : power_of_two(splat(before - rows.largest[r]))[0];
    store(rows.totals + r * LANES, load(rows.totals + r * LANES) * shrunk);
    for (int i = 0; i < DIM; i += LANES) store(rows.gathered + r * DIM + i, load(rows.gathered + r * DIM + i) * shrunk);
  }
  for (int r = 0; r < QUERIES; ++r) {
    float* row = logits + r * KEYS;
    for (int i = 0; i < KEYS; i += LANES) store(row + i, power_of_two(load(row + i) * factor[r] - rows.largest[r]));
    if (cut(r)) hide(row, rows.begin[r], rows.end[r], 0.0f);
    Floats total = load(rows.totals + r * LANES);
    for (int i = 0; i < KEYS; i += LANES) total += load(row + i);
    store(rows.totals + r * LANES, total);
  }
}

// Where a token's keys and values lie, of all heads.
template <typename T>
inline const T* token_of(const Chunk& p, int64_t token, int64_t dim) {
  const int64_t block = p.table[token / p.block_tokens];
  return static_cast<const T*>(p.cache) + (block * p.block_tokens + token % p.block_tokens) * 2 * p.kv_heads * dim;
}

// Has the keys and values of a KV head come from memory while something else is computed.
template <typename T, int DIM>
void fetch(const Chunk& p, int64_t kv_head, int64_t token) {
  constexpr int LINE = 64 / sizeof(T);
  const T* from = token_of<T>(p, token, DIM) + kv_head * DIM;
  for (int i = 0; i < DIM; i += LINE) {
    __builtin_prefetch(from + i);
    __builtin_prefetch(from + p.kv_heads * DIM + i);
  }
}

}  // namespace
