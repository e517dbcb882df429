// Reads all-gather-v and reduce-scatter-v from its input and writes the launches that arrange_uneven makes, for the comparison with Rust
// (tests/kernels/uneven.rs). All numbers have 64 bits.
#include <cstdio>

#include "uneven_arrange.h"

int main() {
  struct {
    uint64_t first_tag, rank, ranks, channels, slots, groups, reduces, type, by, scalar, scalar_at, own;
    collective::UnevenPart parts[WINDLASS_COLLECTIVE_RANKS_MAX];
  } asked;
  while (std::fread(&asked, sizeof asked, 1, stdin) == 1) {
    const collective::Geometry geometry{asked.first_tag, (uint32_t)asked.rank, (uint32_t)asked.ranks, (uint32_t)asked.channels, (uint32_t)asked.slots};
    collective::UnevenRequest request{asked.reduces != 0, (uint32_t)asked.type, (uint32_t)asked.by, {}, asked.own, asked.scalar, asked.scalar_at != 0};
    std::memcpy(request.parts, asked.parts, sizeof asked.parts);
    WindlassCollectiveLaunch launch = collective::arrange_uneven(request, geometry, (uint32_t)asked.groups);
    launch.used_channels = 0;  // C++ has no grids to fill
    std::fwrite(&launch, sizeof launch, 1, stdout);
  }
}
