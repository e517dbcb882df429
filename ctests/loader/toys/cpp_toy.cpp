// A library that looks like NCCL to a loader and is C++ as the real one is: a string grows inside libstdc++ and is
// freed here, exceptions leave calls, and a call blocks where its thread may be cancelled.
#include <nccl.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace {
__attribute__((noinline)) void grow(std::string& text) {
  for (int i = 0; i < 100; i++) text.append("22804 ");
}
}  // namespace

extern "C" {
ncclResult_t ncclGetVersion(int* version) {
  std::string text;
  grow(text);
  *version = std::stoi(text);
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId*) { throw std::runtime_error("no memory for an id"); }

ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int rank) {
  if (rank == 0) throw std::runtime_error("no thread for a rank");
  for (;;) pause();
}

ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
  throw std::runtime_error("no memory for a call");
}

ncclResult_t ncclGroupEnd() { throw std::runtime_error("no thread for a group"); }
}
