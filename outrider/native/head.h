// What lies between the products of a draft head, for the rows of a pass: all numbers are bfloat16.

#pragma once

#include <cstdint>

namespace outrider {

// Writes a row's numbers divided by the root of their mean square, times the weight. output may be the row.
using NormKernel = void (*)(const uint16_t* row, const uint16_t* weight, int64_t num, float epsilon, uint16_t* output);
// Adds numbers to a row.
using AddKernel = void (*)(uint16_t* row, const uint16_t* added, int64_t num);
// Multiplies the silu of a row's first `num` numbers with the second `num`, in place of the first.
using GateKernel = void (*)(uint16_t* row, int64_t num);
// Takes the silu of a row plus other numbers, in place.
using SiluKernel = void (*)(uint16_t* row, const uint16_t* added, int64_t num);
// Rotates each pair (i, i + num / 2) of a head's numbers by an angle's cosines and sines, each [num], in place.
using RotateKernel = void (*)(uint16_t* head, const uint16_t* cosines, const uint16_t* sines, int64_t num);

struct HeadKernels {
  NormKernel norm;
  AddKernel add;
  GateKernel gate;
  SiluKernel silu;
  RotateKernel rotate;
};

HeadKernels head_kernels_avx2();
HeadKernels head_kernels_avx512();

}  // namespace outrider
