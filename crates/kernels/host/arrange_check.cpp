// Reads groups from its input and writes the launches that p2p_arrange makes, for the comparison with Rust (tests/kernels/arrange.rs).
#include <cstdio>

#include "arrange.h"

template <class T>
static bool read(T* to, size_t count) {
  return std::fread(to, sizeof(T), count, stdin) == count;
}

int main() {
  uint32_t counts[2];
  while (read(counts, 2)) {
    std::vector<P2pCall> calls(counts[0]);
    std::vector<P2pPeer> peers(counts[1]);
    WindlassP2pGeometry geometry;
    P2pLimits limits;
    if (!read(calls.data(), calls.size()) || !read(peers.data(), peers.size()) || !read(&geometry, 1) || !read(&limits, 1)) return 1;
    WindlassP2pLaunch launch;
    std::vector<WindlassP2pOperation> operations;
    const P2pShape shape = p2p_arrange(calls.data(), calls.size(), peers.data(), peers.size(), geometry, limits, launch, operations);
    const uint32_t listed = (uint32_t)operations.size();
    std::fwrite(&shape, sizeof shape, 1, stdout);
    std::fwrite(&launch, sizeof launch, 1, stdout);
    std::fwrite(&listed, sizeof listed, 1, stdout);
    std::fwrite(operations.data(), sizeof(WindlassP2pOperation), operations.size(), stdout);
  }
}
