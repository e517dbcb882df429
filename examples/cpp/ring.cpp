// One process a GPU: every rank sends to the next and receives from the one before, until its numbers have been all
// the way round.
//
//   c++ -std=c++17 ring.cpp -o ring -lnccl -lcuda
//   windlass run -- ./ring
//
// Nothing here is Windlass's own: the program is written for NCCL.
//
// Did it work? Every rank prints "0 wrong". With WINDLASS_REPORT=text every process says how its messages went; path p2p says that
// Windlass's kernel moved them. The words in front are no part of the line:
//
//   on the simulator, 2 GPUs: ncclSend p2p 2 2.0 MiB
//   on 2 GPUs joined by NVLink: ncclSend p2p 2 2.0 MiB
//
// "windlass stats" shows the same of programs that still run.
#include <cuda.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace {

constexpr std::size_t kCount = 1 << 18;

void must(int code, const char* what) {
  if (code == 0) return;
  std::fprintf(stderr, "%s: code %d\n", what, code);
  std::exit(1);
}

// Device memory for kCount numbers.
class Buffer {
 public:
  Buffer() { must(cuMemAlloc(&address_, kCount * sizeof(int)), "cuMemAlloc"); }
  ~Buffer() { cuMemFree(address_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* get() const { return reinterpret_cast<void*>(address_); }
  void write(const std::vector<int>& from) { must(cuMemcpyHtoD(address_, from.data(), kCount * sizeof(int)), "copy"); }
  void read(std::vector<int>& to) const { must(cuMemcpyDtoH(to.data(), address_, kCount * sizeof(int)), "copy"); }

 private:
  CUdeviceptr address_ = 0;
};

int run_rank(int rank, int ranks, const ncclUniqueId& id) {
  CUdevice device;
  CUcontext context;
  CUstream stream;
  ncclComm_t communicator;
  must(cuInit(0), "cuInit");
  must(cuDeviceGet(&device, rank), "cuDeviceGet");
  must(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  must(ncclCommInitRank(&communicator, ranks, id, rank), "ncclCommInitRank");

  std::vector<int> numbers(kCount, rank), seen(kCount);
  int wrong = 0;
  {
    Buffer held, arriving;
    held.write(numbers);
    const int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    auto* from = &held;
    auto* to = &arriving;
    for (int step = 0; step < ranks; step++) {
      // Both at once: a send alone may wait for its receive.
      must(ncclGroupStart(), "ncclGroupStart");
      must(ncclSend(from->get(), kCount, ncclInt, next, communicator, (cudaStream_t)stream), "ncclSend");
      must(ncclRecv(to->get(), kCount, ncclInt, before, communicator, (cudaStream_t)stream), "ncclRecv");
      must(ncclGroupEnd(), "ncclGroupEnd");
      std::swap(from, to);
    }
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    from->read(seen);
    for (int number : seen) wrong += number != rank;
  }
  must(ncclCommDestroy(communicator), "ncclCommDestroy");
  must(cuStreamDestroy(stream), "cuStreamDestroy");
  std::printf("rank %d of %d: %d wrong\n", rank, ranks, wrong);
  return wrong != 0;
}

// Asked in a child of its own, so that the ranks are forked from a process without CUDA.
int count_devices() {
  const pid_t child = fork();
  if (child == 0) {
    int count = 0;
    const bool known = cuInit(0) == CUDA_SUCCESS && cuDeviceGetCount(&count) == CUDA_SUCCESS;
    _exit(known ? count : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

}  // namespace

int main() {
  const int ranks = count_devices();
  if (ranks == 0) return std::fprintf(stderr, "no GPU\n"), 1;
  int to_others[2];
  if (pipe(to_others) != 0) return 1;
  for (int rank = 0; rank < ranks; rank++) {
    if (fork() != 0) continue;
    ncclUniqueId id;
    if (rank == 0) {
      // Rank 0 makes the id and writes one copy for each of the others.
      must(ncclGetUniqueId(&id), "ncclGetUniqueId");
      for (int other = 1; other < ranks; other++) must(write(to_others[1], &id, sizeof id) != sizeof id, "write");
    } else {
      must(read(to_others[0], &id, sizeof id) != sizeof id, "read");
    }
    return run_rank(rank, ranks, id);
  }
  int failed = 0, status = 0;
  while (wait(&status) > 0) failed += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
  return failed != 0;
}
