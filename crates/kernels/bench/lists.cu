// Several all-gathers, or reduce-scatters, of uneven shares in one group: two broadcasts (reduces) each, with a root each, graph and eager.
// Two GPUs of one process over whichever libnccl.so.2 the loader finds: run it over NCCL, then over Windlass.
//
//   nvcc -O2 -std=c++20 -arch=sm_90 -I$NCCL/include lists.cu -o lists -L$NCCL/lib -l:libnccl.so.2 && ./lists
#include <cuda_runtime.h>
#include <nccl.h>
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define CU(x) do { auto err_ = (x); if ((int)err_) { fprintf(stderr, "%s: %d line %d\n", #x, (int)err_, __LINE__); exit(1); } } while (0)
int main() {
  ncclUniqueId id; CU(ncclGetUniqueId(&id));
  std::barrier<> together(2);
  auto rank = [&](int me) {
    CU(cudaSetDevice(me));
    ncclComm_t comm; CU(ncclCommInitRank(&comm, 2, id, me));
    cudaStream_t s; CU(cudaStreamCreate(&s));
    char *in, *out; CU(cudaMalloc(&in, 256 << 20)); CU(cudaMalloc(&out, 256 << 20));
    cudaEvent_t a, b; CU(cudaEventCreate(&a)); CU(cudaEventCreate(&b));
    for (int reduces = 0; reduces < 2; reduces++)
    for (size_t bytes : {size_t(1) << 10, size_t(16) << 10, size_t(64) << 10, size_t(256) << 10, size_t(1) << 20, size_t(4) << 20})
      for (int lists : {1, 2, 3, 4, 6, 8, 16, 32}) {
        if (bytes * lists > (64 << 20)) continue;
        auto group = [&] {
          CU(ncclGroupStart());
          for (int l = 0; l < lists; l++)
            for (int r = 0; r < 2; r++) {
              size_t n = bytes / 2 / 4 * (r ? 5 : 3) / 4, at = (size_t)l * bytes * 2 + r * bytes;
              if (reduces) CU(ncclReduce(in + at, out + at, n, ncclFloat, ncclSum, r, comm, s));
              else CU(ncclBroadcast(in + at, out + at, n, ncclFloat, r, comm, s));
            }
          CU(ncclGroupEnd());
        };
        for (int i = 0; i < 3; i++) group();
        CU(cudaStreamSynchronize(s));
        cudaGraph_t g; cudaGraphExec_t e;
        CU(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < 20; i++) group();
        CU(cudaStreamEndCapture(s, &g)); CU(cudaGraphInstantiate(&e, g, 0));
        std::vector<float> us, eager;
        for (int batch = 0; batch < 11; batch++) {
          CU(cudaStreamSynchronize(s)); together.arrive_and_wait();
          group(); CU(cudaEventRecord(a, s)); CU(cudaGraphLaunch(e, s)); CU(cudaEventRecord(b, s)); CU(cudaStreamSynchronize(s));
          float ms; CU(cudaEventElapsedTime(&ms, a, b)); us.push_back(ms * 50);
          together.arrive_and_wait();
          CU(cudaEventRecord(a, s)); for (int i = 0; i < 20; i++) group(); CU(cudaEventRecord(b, s)); CU(cudaStreamSynchronize(s));
          CU(cudaEventElapsedTime(&ms, a, b)); eager.push_back(ms * 50);
        }
        CU(cudaGraphExecDestroy(e)); CU(cudaGraphDestroy(g));
        std::sort(us.begin(), us.end()); std::sort(eager.begin(), eager.end());
        if (me == 0) printf("%s %8zu bytes %2d lists: graph %8.2f eager %8.2f us\n", reduces ? "reduces   " : "broadcasts", bytes, lists, us[5], eager[5]), fflush(stdout);
        together.arrive_and_wait();
      }
    CU(ncclCommDestroy(comm));
  };
  std::thread other(rank, 1); rank(0); other.join();
}
