// Which variant of the operators a CPU can run.

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "operators.h"

namespace {

// Whether the CPU has AMX for bfloat16, and the operating system lets this process use it.
bool may_use_tiles() {
  static const bool may = [] {
    constexpr unsigned int kLeaf = 7, kBfloat16 = 1u << 22, kTiles = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(kLeaf, 0, &eax, &ebx, &ecx, &edx)) return false;
    if (!(edx & kBfloat16) || !(edx & kTiles)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return may;
}

}  // namespace

int64_t outrider::best_variant() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return -1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return 0;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return 1;
  return may_use_tiles() ? 3 : 2;
}

STABLE_TORCH_LIBRARY_FRAGMENT(outrider, library) { library.def("best_variant() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(outrider, CompositeExplicitAutograd, library) {
  library.impl("best_variant", TORCH_BOX(&outrider::best_variant));
}
