// Reads groups from its input and writes what mail_arrange makes of them, for the comparison with Rust (tests/kernels/arrange.rs).
#include <cstdio>

#include "arrange.h"

template <class T>
static bool read(T* to, size_t count) {
  return std::fread(to, sizeof(T), count, stdin) == count;
}

int main() {
  uint32_t counts[2];
  while (read(counts, 2)) {
    std::vector<MailCall> calls(counts[0]);
    std::vector<MailPeer> peers(counts[1]);
    WindlassMailGeometry geometry;
    MailLimits limits;
    if (!read(calls.data(), calls.size()) || !read(peers.data(), peers.size()) || !read(&geometry, 1) || !read(&limits, 1)) return 1;
    WindlassMailLaunch launch;
    std::vector<WindlassMailOperation> operations;
    const MailShape shape = mail_arrange(calls.data(), calls.size(), peers.data(), peers.size(), geometry, limits, launch, operations);
    const uint32_t listed = (uint32_t)operations.size();
    std::fwrite(&shape, sizeof shape, 1, stdout);
    std::fwrite(&launch, sizeof launch, 1, stdout);
    std::fwrite(&listed, sizeof listed, 1, stdout);
    std::fwrite(operations.data(), sizeof(WindlassMailOperation), operations.size(), stdout);
  }
}
